"""Triton kernels for the operations between a block's matrix products, each with its own backward.

A block's time outside its products is memory traffic. Written out, it takes four passes over the data
(`norms` twice, `rotary`, `swiglu`), and the loss a fifth. Arithmetic is fp32 inside; values are read and
written in the dtype they have. The plain modules beside this folder define what they compute, and the tests
compare the two.
"""

import torch
from torch import Tensor


def on_hopper(x: Tensor) -> bool:
    """Return True if x is on a Hopper GPU, for which some kernels have tile sizes of their own."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 9
