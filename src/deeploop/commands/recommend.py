"""`deeploop recommend`: rule, alpha, peak rate and warm-up for a shape, and the runs that say so."""

import json
from dataclasses import asdict, dataclass

from deeploop.commands.parsing import run_command
from deeploop.report.page import text_table
from deeploop.report.recommend import BIAS, LONG_TRAINING, Recommendation, recommend

SHOWN_RUNS = 3


@dataclass(frozen=True)
class RecommendArgs:
    """Which rule, at which learning rate, for K blocks, R rounds and a width, by the runs in docs/results."""

    blocks: int
    """Stored blocks K."""
    rounds: int
    """Rounds R: how often the blocks are visited."""
    width: int
    """Width of the residual stream."""
    tokens: int | None = None
    """Tokens that you will train on; unset: what the runs had."""
    json: bool = False
    """Print one JSON object instead of text."""


def run(args: RecommendArgs) -> str:
    """The text that `deeploop recommend` prints."""
    found = recommend(args.blocks, args.rounds, args.width, args.tokens)
    if args.json:
        record = asdict(found) | {"scales": found.scales._asdict()}
        return json.dumps(record, indent=1, ensure_ascii=False)
    answer = "\n".join(f"{name:<12}  {text}".rstrip() for name, text in lines(found))
    return f"{answer}\n\n{compared(found)}"


def lines(found: Recommendation) -> list[tuple[str, str]]:
    interval = " (95% over seeds: {:.2g} to {:.2g})".format(*found.interval) if found.interval else ""
    more = f", … ({len(found.runs)} runs)" if len(found.runs) > SHOWN_RUNS else ""
    scales = [
        (symbol, f"{value:.4g}") for symbol, value in zip("αβε", found.scales, strict=True) if value != 1
    ]
    return [
        ("rule", f"{found.rule}: {flags(found)}"),
        *scales,
        ("long runs", LONG_TRAINING),
        ("peak rate", f"{found.peak_lr:g}{interval}"),
        ("warm-up", f"{found.warmup:.0%} of the steps, as in the runs; no other was tried"),
        ("rests on", f"{found.folder}: {', '.join(found.runs[:SHOWN_RUNS])}{more}"),
        ("runs with", found.conditions),
        *(("extrapolated" if not index else "", text) for index, text in enumerate(found.extrapolated)),
        *(("other widths" if not index else "", text) for index, text in enumerate(found.other_widths)),
    ]


def flags(found: Recommendation) -> str:
    """What follows `deeploop train RECIPE` to have the rule; the unigram bias too, where the runs had it."""
    bias = " --model.unigram-bias" if found.settings.get(BIAS) else ""
    return f"--model.rule {found.settings['model.rule']}{bias}"


def compared(found: Recommendation) -> str:
    header = (
        "rule",
        "best loss at this R",
        "at a peak rate of",
        "½× or 2× that costs",
        "one rate for every R?",
    )
    rows = [
        (
            one.rule,
            f"{one.loss:.3f}",
            f"{one.peak_lr:g}",
            "–" if one.octave is None else f"{one.octave:+.3f}",
            one.verdict,
        )
        for one in found.compared
    ]
    return text_table(header, rows) + f"\n{found.chosen_in}"


def main(arguments: list[str]) -> int:
    return run_command(RecommendArgs, run, arguments, prog="deeploop recommend")
