"""Weights that let every part of a model count: fresh ones hide too much."""

import torch
from torch import nn

from deeploop.nn import RMSNorm


@torch.no_grad()
def shaken(model):
    """The model with random gains, larger matrices and random biases, drawn on the CPU."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, RMSNorm) and module.weight is not None:
            module.weight.uniform_(0.5, 2.0, generator=generator)
        elif isinstance(module, nn.Linear):
            module.weight.normal_(0, 0.3, generator=generator)
            if module.bias is not None:
                module.bias.normal_(0, 0.3, generator=generator)
    return model
