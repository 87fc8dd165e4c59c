"""What the runs under docs/results say about rules and rates, as the package carries it: assets/rules.json.

`make results` writes that file (tools/rules_table.py), `report.recommend` reads it. No torch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import deeploop
from deeploop.config import old_names
from deeploop.files import read_object
from deeploop.report.transfer import JUDGED_AT, Optimum, Study, Transfer

FILE = Path(deeploop.__file__).parent / "assets" / "rules.json"
FORMAT = 1
DIGITS = 6  # of every number, so that the file is the same on every machine


@dataclass(frozen=True)
class Rate:
    """A rule's best peak rate at one R."""

    rounds: int
    peak: float
    interval: tuple[float, float] | None
    mark: str
    loss: float
    octave: float | None
    """What a rate twice or half as high costs; None where no parabola was fitted."""
    seeds: int
    runs: tuple[str, ...]


@dataclass(frozen=True)
class Measured:
    """One rule in one study."""

    rule: str
    settings: Mapping[str, Any]
    """Fields of its config, such as model.rule."""
    rates: tuple[Rate, ...]
    """By R."""
    slope: float | None
    slope_interval: tuple[float, float] | None
    regret: float | None
    """At R = 16; None where it was not measured, or where R = 1's best rate is lost there."""
    transfers: bool | None
    verdict: str


@dataclass(frozen=True)
class Evidence:
    """Rules compared in one folder of runs, and under which conditions."""

    folder: str
    blocks: int
    width: int
    context: int
    batch: int
    steps: int
    warmup_steps: int
    optimizer: str
    corpus: str
    rules: tuple[Measured, ...]

    @property
    def tokens(self) -> int:
        return self.steps * self.batch * self.context

    @property
    def conditions(self) -> str:
        amount = f"{self.steps:,} steps of {self.batch} × {self.context} tokens ({self.tokens / 1e6:.1f} M)"
        return f"K = {self.blocks}, width {self.width}, {amount}, {self.corpus}, {self.optimizer}"


def evidence_of(study: Study, folder: str) -> Evidence:
    fields = study.runs[0].fields
    return Evidence(
        folder,
        blocks=fields["model.blocks"],
        width=fields["model.width"],
        context=fields["model.context"],
        batch=fields["optim.batch"],
        steps=fields["optim.steps"],
        warmup_steps=fields["optim.warmup_steps"],
        optimizer=fields.get("optim.kind", "adamw"),
        corpus=Path(fields["data.path"]).name,
        rules=tuple(_measured(rule) for rule in study.rules.values() if rule.optima),
    )


def _measured(rule: Transfer) -> Measured:
    regret, slope = rule.regret(JUDGED_AT), rule.slope
    return Measured(
        rule.rule,
        dict(rule.settings),
        tuple(_rate(R, optimum) for R, optimum in rule.optima.items()),
        None if slope is None else _short(slope.value),
        None if slope is None else _short_pair(slope.interval),
        None if regret is None or math.isinf(regret) else _short(regret),
        rule.transfers,
        rule.verdict,
    )


def _rate(R: int, best: Optimum) -> Rate:
    interval = _short_pair(best.interval)
    octave = None if best.octave is None else _short(best.octave)
    return Rate(R, _short(best.peak), interval, best.mark, _short(best.loss), octave, best.seeds, best.runs)


def _short(value: float) -> float:
    return round(value, 12) if abs(value) < 1e-9 else float(f"{value:.{DIGITS}g}")


def _short_pair(pair: tuple[float, float] | None) -> tuple[float, float] | None:
    return None if pair is None else (_short(pair[0]), _short(pair[1]))


def to_json(evidence: Sequence[Evidence]) -> dict[str, Any]:
    return {"format": FORMAT, "evidence": [asdict(one) for one in evidence]}


def read_evidence(path: Path = FILE) -> list[Evidence]:
    return [_evidence(entry) for entry in read_object(path)["evidence"]]


def _evidence(entry: Mapping[str, Any]) -> Evidence:
    return Evidence(**{**entry, "rules": tuple(map(_read_rule, entry["rules"]))})


def _read_rule(entry: Mapping[str, Any]) -> Measured:
    rates, interval = tuple(map(_read_rate, entry["rates"])), _pair(entry["slope_interval"])
    settings = old_names.fields(entry["settings"], "language")
    return Measured(**{**entry, "settings": settings, "rates": rates, "slope_interval": interval})


def _read_rate(entry: Mapping[str, Any]) -> Rate:
    return Rate(**{**entry, "interval": _pair(entry["interval"]), "runs": tuple(entry["runs"])})


def _pair(values: Sequence[float] | None) -> tuple[float, float] | None:
    return None if values is None else (values[0], values[1])
