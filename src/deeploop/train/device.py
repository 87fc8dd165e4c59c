"""The name of a device, and its peak speed."""

import torch

# Peak dense bf16 FLOP/s from the data sheets, for model FLOPs utilization (`mfu`).
PEAK_FLOPS = {
    "H200": 989e12,  # a GH200 too
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}


def peak_flops(device: torch.device) -> float | None:
    """Return the peak FLOP/s of a device; None if unknown, as for every CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)


def device_name(device: torch.device) -> str:
    """Return the name of a device for display."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_threads()


def cpu_threads() -> str:
    """Return the number of CPU threads that torch uses, for display."""
    count = torch.get_num_threads()
    return f"{count} CPU thread{'s' * (count != 1)}"
