"""Triton kernels for what stands between the matrix products of a block, each with its own backward.

A block's time outside its products is memory traffic. Written out, it takes four passes over the data
(`norms` twice, `rotary`, `swiglu`), and the loss a fifth. Arithmetic is fp32 inside; values are read and
written in the dtype they have. What they compute is said by the plain modules beside this folder, and the
tests hold them to it.
"""

import torch
from torch import Tensor


def on_hopper(x: Tensor) -> bool:
    """Return True if x is on a Hopper GPU, for which some kernels have tile sizes of their own."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 9
