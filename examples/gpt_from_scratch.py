"""A looped GPT in a training loop of your own: two blocks applied four times, by the rule 1/N.

It learns the bytes of this file. `deeploop train tiny` is the same with deeploop's own loop.
Run: python examples/gpt_from_scratch.py
"""

from pathlib import Path

import torch

from deeploop import GPTConfig, LoopedGPT

CONTEXT, BATCH = 64, 8
text = torch.tensor(list(Path(__file__).read_bytes()))


def batch():
    """Random pieces of the text, and the same one byte later."""
    starts = torch.randint(len(text) - CONTEXT, (BATCH,))
    pieces = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
    return pieces[:, :-1], pieces[:, 1:].contiguous()


if __name__ == "__main__":
    torch.manual_seed(0)
    config = GPTConfig(
        rule="averaged", blocks=2, rounds=4, width=64, heads=2, hidden=176, vocabulary=256, context=CONTEXT
    )
    model = LoopedGPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {config.depth} blocks deep")
    for step in range(61):
        inputs, targets = batch()
        loss = model(inputs, targets).loss / targets.numel()  # the model returns the sum
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:3d}  loss {loss.item():.3f}")
    for rounds in (1, 2, 4, 8):  # test-time depth
        model.set_rounds(rounds)
        with torch.no_grad():
            loss = model(inputs, targets).loss / targets.numel()
        print(f"R = {rounds}: loss {loss.item():.3f}")
