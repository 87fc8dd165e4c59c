"""The rule in a model that is not ours: torch's own attention, two blocks looped six times.

The task is to reverse a sequence of digits. Run: python examples/own_model.py
"""

import torch
import torch.nn.functional as F
from torch import nn

from deeploop.nn import RMSNorm, ScaledResidual, init_residual_branch_
from deeploop.theory import DEEPLOOP

BLOCKS, ROUNDS, WIDTH, LENGTH, DIGITS = 2, 6, 64, 8, 10
alpha, beta = DEEPLOOP.alpha(BLOCKS * ROUNDS), DEEPLOOP.beta(BLOCKS * ROUNDS)


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
            # No biases: torch would draw them without β, and they would drown the scaled branch.
            attention = Attention(WIDTH, num_heads=4, bias=False, batch_first=True)
            up, down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
            mlp = nn.Sequential(up, nn.GELU(), down)
            value = attention.in_proj_weight[2 * WIDTH :]  # β is for the value rows, not for q and k
            scaled = [value, attention.out_proj.weight, up.weight, down.weight]
            init_residual_branch_(scaled, std=WIDTH**-0.5, beta=beta)
            self.sublayers += [ScaledResidual(branch, WIDTH, alpha=alpha) for branch in (attention, mlp)]
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
    print(f"{BLOCKS} blocks × {ROUNDS} rounds: alpha {alpha:.3f}, beta {beta:.3f}")
    for step in range(101):
        tokens = torch.randint(DIGITS, (32, LENGTH))
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flip(1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:3d}  loss {loss.item():.3f}")
