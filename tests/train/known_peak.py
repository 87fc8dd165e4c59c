"""A CPU with a peak, so that its utilization (MFU) is a number that a test can check."""

import sys

from deeploop.models.accounting import flops_per_token

PEAK = 1e9  # FLOP/s


def set_peak(setattr=setattr):
    """Makes `peak_flops` answer PEAK wherever `train` has imported it."""
    for name, module in list(sys.modules.items()):
        if name.startswith("deeploop.train") and hasattr(module, "peak_flops"):
            setattr(module, "peak_flops", lambda device: PEAK)


def expected_mfu(config, record, ranks):
    """The FLOPs that a second of this record took, as a share of what the ranks could do."""
    return record["tokens_per_s"] * flops_per_token(config.model) / (ranks * PEAK)
