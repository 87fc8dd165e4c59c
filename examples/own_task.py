"""A task of your own in deeploop's training loop: your data, loss and evaluation, a looped GPT of ours.

The task is to sort eight digits. Checkpoints, resume, metrics and the learning rate are the loop's.
Run: python examples/own_task.py [RUN FOLDER]
"""

import sys
import tempfile
from pathlib import Path

import torch

from deeploop import GPTConfig, LoopedGPT
from deeploop.train import CustomDataConfig, CustomTask, CustomTrainConfig, OptimConfig, load_last, train

LENGTH, DIGITS = 8, 10


def examples(seed, count):
    """Digits, a separator, the same digits sorted; targets are the second half, and -1 before it."""
    digits = torch.randint(DIGITS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    answers = digits.sort(dim=1).values
    inputs = torch.cat([digits, torch.full((count, 1), DIGITS), answers[:, :-1]], dim=1)
    return inputs, torch.cat([torch.full_like(digits, -1), answers], dim=1)


class Sorting(CustomTask):
    def batch(self, step):
        return examples(1_000_000 * (self.config.seed + 1) + step, self.config.optim.batch)

    def batch_loss(self, model, inputs, targets):
        return model(inputs, targets).loss / (targets >= 0).sum()  # any loss: the mean over these rows

    @torch.no_grad()
    def evaluate(self, model):
        inputs, targets = (part.to(self.world.device) for part in examples(0, 256))
        output = model.eval()(inputs, targets)
        guesses = model.logits(output.states).argmax(-1)  # a LoopedGPT: `build` may return another
        asked = targets >= 0
        right = (guesses == targets)[asked].float().mean()
        return {"loss": (output.loss / asked.sum()).item(), "right": right.item()}


def config(out):
    return CustomTrainConfig(
        out=out,
        model=GPTConfig(
            rule="averaged", blocks=2, rounds=4, width=64, heads=2, hidden=128,
            vocabulary=DIGITS + 1, context=2 * LENGTH,
        ),
        data=CustomDataConfig(validate_every=50),
        optim=OptimConfig(steps=150, batch=32, peak_lr=4e-3, warmup_steps=20),
    )  # fmt: skip


if __name__ == "__main__":
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp()) / "sorting"
    result = train(config(out), task=Sorting)
    print(f"{result['ended']} at step {result['step']}: {result['right']:.1%} of the digits right, in {out}")
    model = LoopedGPT(config(out).model)
    load_last(model, out)  # the weights of the last checkpoint
