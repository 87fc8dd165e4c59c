"""What a command says when its device's memory is full."""

from collections.abc import Iterator
from contextlib import contextmanager

from deeploop.exits import OutOfDeviceMemory


@contextmanager
def memory_advice(options: str) -> Iterator[None]:
    """Turns torch's errors about a full device into one line that names the options to try."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfDeviceMemory(f"the GPU's memory is full; try {options}") from None


def is_out_of_memory(error: RuntimeError) -> bool:
    """By torch's allocator, the driver or cuBLAS; the last two say so in their text alone."""
    import torch  # now: --help of the commands that give advice does not wait for it

    said = any(words in str(error) for words in ("out of memory", "ALLOC_FAILED"))
    return said or isinstance(error, torch.OutOfMemoryError)
