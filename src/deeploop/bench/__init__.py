"""Time training and decoding: `deeploop bench`."""

from deeploop.bench.options import BenchArgs


def run(args: BenchArgs) -> str:
    """Time what the options name, and return the table."""
    from deeploop.bench import decode, training  # now: they import torch

    return decode.run(args) if args.decode else training.run(args)
