"""The rule in a model that is not ours: torch's own attention, two blocks looped six times.

The task is to reverse a sequence of digits. Run: python examples/own_model.py
"""

import torch
import torch.nn.functional as F
from torch import nn

from deeploop.nn import RMSNorm, ScaledResidual

BLOCKS, ROUNDS, WIDTH, LENGTH, DIGITS = 2, 6, 64, 8, 10


class Attention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


class Reverser(nn.Module):
    def __init__(self):
        super().__init__()
        self.digits, self.places = nn.Embedding(DIGITS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.input_norm = RMSNorm(WIDTH)  # the loop starts from a stream of RMS 1
        self.sublayers = nn.ModuleList()
        for _ in range(BLOCKS):
            attention = Attention(WIDTH, num_heads=4, batch_first=True)
            mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            # α is in the residual; β is drawn into the branch's matrices, but for queries and keys.
            self.sublayers += [
                ScaledResidual(branch, WIDTH, "deeploop", blocks=BLOCKS, rounds=ROUNDS)
                for branch in (attention, mlp)
            ]
        self.head = nn.Linear(WIDTH, DIGITS)

    def forward(self, tokens):
        x = self.input_norm(self.digits(tokens) + self.places.weight)
        for _ in range(ROUNDS):
            for sublayer in self.sublayers:
                x = sublayer(x)
        return self.head(x)


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Reverser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    print(f"{BLOCKS} blocks × {ROUNDS} rounds: {model.sublayers[0]}")
    for step in range(101):
        tokens = torch.randint(DIGITS, (32, LENGTH))
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flip(1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:3d}  loss {loss.item():.3f}")
