"""Gives a pretrained transformers model a loop, and heals it for a few steps.

Without a path it makes a small Llama that has learned to copy digits. With one it reads that folder (Llama,
Mistral, Qwen2, Qwen3; safetensors) and heals it on this repository's README.

Run: python examples/retrofit.py [MODEL FOLDER] [CORE]
It needs transformers: pip install -c constraints.txt -e ".[hf]"
"""

import runpy
import sys
import tempfile
from pathlib import Path

import torch

from deeploop.retrofit import loop_pretrained

try:
    from transformers import AutoModelForCausalLM, AutoTokenizer
except ImportError:
    raise SystemExit('needs transformers: pip install -c constraints.txt -e ".[hf]"') from None

HERE = Path(__file__).parent
ROUNDS = (1, 2, 4)


def pretrain(folder, steps=60):
    """A small Llama that copies digits (examples/hf_llama.py), saved as transformers saves it."""
    example = runpy.run_path(str(HERE / "hf_llama.py"))
    torch.manual_seed(0)
    model, sequences = example["make_llama"](), example["sequences"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        tokens = sequences(16)
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return lambda: sequences(16)


def text_batches(folder, length=64, rows=2):
    """Random pieces of README in the model's own tokens."""
    text = (HERE.parent / "README.md").read_text(encoding="utf-8")
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])
    return lambda: torch.stack([ids[i : i + length] for i in torch.randint(len(ids) - length, (rows,))])


def loss_of(model, tokens, rounds):
    """Mean loss in nats per token at so many rounds."""
    model.set_rounds(rounds)
    return model(tokens[:, :-1], tokens[:, 1:].contiguous()).loss / tokens[:, 1:].numel()


@torch.no_grad()
def show(what, model, tokens):
    losses = ", ".join(f"R = {rounds}: {loss_of(model, tokens, rounds).item():.3f}" for rounds in ROUNDS)
    print(f"{what:<15} {losses}")


def heal(model, batches, steps=40):
    """Continued training at a random number of rounds per step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for _ in range(steps):
        loss_of(model, batches(), ROUNDS[int(torch.randint(len(ROUNDS), ()))]).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    core = sys.argv[2] if len(sys.argv) > 2 else "1"
    batches = text_batches(folder) if len(sys.argv) > 1 else pretrain(folder)
    source = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model = loop_pretrained(folder, core, rounds=1)
    held_out = batches()
    with torch.no_grad():
        apart = (model.logits(model(held_out).states) - source(held_out).logits).abs().max()
    print(f"layers {core} looped; at R = 1 the logits differ from the source's by at most {apart:.1e}")
    show("before healing", model, held_out)
    heal(model, batches)
    show("after healing", model, held_out)
