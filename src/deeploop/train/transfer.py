"""Asynchronous copies between host and device."""

from typing import NamedTuple

import torch
from torch import Tensor


class OnHost(NamedTuple):
    """Pinned host memory that a device copies into."""

    values: Tensor
    arrived: torch.cuda.Event | None
    """None if the values are already available."""

    def read(self) -> Tensor:
        """Return the values, waiting only for work that was queued before the copy."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.values


def copy_to_host(values: Tensor) -> OnHost:
    """Start a copy to the host; on a CPU the values themselves."""
    if values.device.type != "cuda":
        return OnHost(values, None)
    on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    on_host.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return OnHost(on_host, arrived)


def copy_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Start a copy to the device, for work queued after this call."""
    if device.type != "cuda":
        return values.to(device)
    # From pageable memory the host would wait for all that is queued before.
    return values.pin_memory().to(device, non_blocking=True)
