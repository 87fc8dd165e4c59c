"""The model of the collapse (theory/escape.py) beside the recorded starts of docs/results/alignment.

Run: python benchmarks/escape_model.py
"""

import json
import math
from pathlib import Path
from statistics import fmean

from deeploop.experiments.page import text_table
from deeploop.theory.escape import critical_ramp, critical_sum
from deeploop.theory.scaling import ScalingRule
from deeploop.train.config import TrainConfig, from_dict
from deeploop.train.metrics import read_metrics

RECORDS = Path(__file__).parents[1] / "docs" / "results" / "alignment"
STARTS = (
    "deeploop-warmup2000",
    "deeploop-warmup600",
    "deeploop-warmup100",
    "deepnorm-warmup600",
    "p1-warmup100",
)
HALF = math.atanh(math.sqrt(0.5))  # G at a token similarity of one half


def row(folder: Path) -> list[str]:
    """One start: the sum of learning rates at similarity one half, and how large the branches became."""
    config = from_dict(TrainConfig, json.loads((folder / "config.json").read_text()))
    model, ramp = config.model, config.optim.peak_lr / config.optim.warmup_steps
    records = [record for record in read_metrics(folder, "diagnose") if record["step"]]
    sums = {record["step"]: ramp * record["step"] * (record["step"] + 1) / 2 for record in records}
    rule = ScalingRule(model.p)
    predicted = math.sqrt(HALF) * critical_sum(model.depth, rule, model.width)
    rate = math.sqrt(2 * ramp * critical_sum(model.depth, rule, model.width))
    return [
        f"{model.p:g}",
        f"{ramp:.1e}",
        f"{crossing(records, sums):.2e}",
        f"{predicted:.2e}",
        f"{max(attention(record) for record in records):.2f}",
        f"{rate * model.width * math.sqrt(1 / (rule.alpha(model.depth) * model.depth)):.4f}",
        f"{attention(records[-1]):.2f}",
        f"{records[-1]['similarity']:.2f}",
        f"{critical_ramp(model.depth, rule, model.width):.1e}",
    ]


def attention(record: dict) -> float:
    """Mean of branch over skip, over all visits of attention."""
    own = [visits["ratio"] for name, visits in record["stream"].items() if "attention" in name]
    return fmean(ratio for ratios in own for ratio in ratios)


def crossing(records: list[dict], sums: dict[int, float]) -> float:
    """Where the similarity passes one half: log G against log S between the two records around it."""
    turned = [math.atanh(math.sqrt(min(0.9999, record["similarity"]))) for record in records]
    after = next(index for index, G in enumerate(turned) if G >= HALF)
    S, T = (sums[records[index]["step"]] for index in (after - 1, after))
    share = math.log(HALF / turned[after - 1]) / math.log(turned[after] / turned[after - 1])
    return S * (T / S) ** share


if __name__ == "__main__":
    header = ("p", "ramp", "S at ½", "model", "branch/skip, most", "d·rate/√(αN)", "last", "similarity", "r*")
    print(text_table(header, [row(RECORDS / f"start-{name}") for name in STARTS]))
