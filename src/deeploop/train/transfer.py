"""Copies between host and device that nobody waits for until their values are needed."""

from typing import NamedTuple

import torch
from torch import Tensor


class OnHost(NamedTuple):
    """Memory of the host in which a device's values arrive."""

    values: Tensor
    arrived: torch.cuda.Event | None
    """None: they are there."""

    def read(self) -> Tensor:
        """The values. Waits for the work that was queued before the copy, and for none after it."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.values


def copy_to_host(values: Tensor) -> OnHost:
    """A copy that is under way; on a CPU the values themselves."""
    if values.device.type != "cuda":
        return OnHost(values, None)
    on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    on_host.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return OnHost(on_host, arrived)


def copy_to_device(values: Tensor, device: torch.device) -> Tensor:
    """The host's values for work that is queued after this call."""
    if device.type != "cuda":
        return values.to(device)
    # From pageable memory the host would wait for all that is queued before.
    return values.pin_memory().to(device, non_blocking=True)
