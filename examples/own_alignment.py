"""κ_R of a looped PyTorch model that knows nothing of deeploop: name what is shared and how often they run.

python examples/own_alignment.py
"""

import torch
from torch import nn

from deeploop.diagnose.alignment import kappa, measure

torch.manual_seed(0)
ROUNDS, WIDTH = 6, 64
layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=128, dropout=0.0, batch_first=True)
head = nn.Linear(WIDTH, 10)
x, y = torch.randn(8, 16, WIDTH), torch.randint(0, 10, (8, 16))


def states() -> torch.Tensor:
    h = x
    for _ in range(ROUNDS):  # one stored layer, visited six times
        h = layer(h)
    return h


def loss() -> torch.Tensor:
    return nn.functional.cross_entropy(head(states()).flatten(0, 1), y.flatten())


found = measure({"attention": layer.self_attn, "up": layer.linear1, "down": layer.linear2},
                rounds=ROUNDS, loss=loss, output=states)  # fmt: skip
for one in found:
    print(
        f"{one.name:<10} own κ {one.own_kappa:.2f}, cosine of rounds 1 and 2: {one.update_cosines[0][1]:.2f}"
    )
print(f"κ_R = {kappa(found):.2f} of at most {ROUNDS}")
