"""The validation loss of a run, at any depth and on any corpus with its tokenizer: `deeploop validate`.

The result is added to validation.json in the run folder. Several rounds or adaptive depth make it a sweep
over test-time depth, written to depth.json, with all comparable results in depth.png.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deeploop.data.shards import Corpus
from deeploop.data.token_loader import validation_windows
from deeploop.data.tokenizers import Tokenizer
from deeploop.eval.depth import (
    Windows,
    between_depths,
    count_bytes,
    score_adaptive,
    score_budget,
    score_rounds,
)
from deeploop.exits import memory_advice
from deeploop.models.adaptive import AdaptiveDepth, ExitRule, decodes_to_validate
from deeploop.models.gpt import LoopedGPT
from deeploop.report import plots, results
from deeploop.report.tables import text_table
from deeploop.runs.folder import load_config, provenance, require_checkpoint, results_folder
from deeploop.tasks.chat.config import ChatDataConfig
from deeploop.tasks.chat.loader import held_out_rows
from deeploop.tasks.chat.task import open_chat
from deeploop.tasks.language import scores
from deeploop.tasks.language.config import TrainConfig
from deeploop.tasks.language.options import ValidateArgs
from deeploop.tasks.language.text import mixture_windows, open_mixture
from deeploop.train.distributed import arithmetic, open_world
from deeploop.train.rundir import check_tokenizer, load

# A result that agrees in these replaces an earlier one; others are kept.
IDENTITY = ("checkpoint", "data", "sequences", "recompute_alpha", "asked")
MOST_DECODED = 64
THRESHOLDS = {"change": (0.6, 0.4, 0.2, 0.1), "kl": (0.1, 0.01, 0.001), "gate": (0.3, 0.5, 0.7, 0.9)}


def run(args: ValidateArgs) -> str:
    """Evaluate, write the results into the run folder, and return the text to print."""
    config = load_config(args.run, f"; `deeploop eval {args.run}` scores it")
    if args.thresholds and len(args.adaptive) != 1:
        asked = " ".join(f"{threshold:g}" for threshold in args.thresholds)
        raise ValueError(f"thresholds={asked}: goes with one of --adaptive change, kl or gate")
    if (asked := needs_decoding(args, config)) and config.data.mask_documents:
        raise ValueError(
            f"{asked}: must be unset for a run with data.mask_documents, which can't be decoded with a cache"
        )
    is_sweep = len(set(args.rounds)) > 1 or bool(args.adaptive)
    folder, name = results_folder(args.run), "depth.json" if is_sweep else "validation.json"
    results.check(folder, name)
    device_config = replace(config.device, kind=args.device)
    with memory_advice("--device cpu"), open_world(device_config) as world:
        checkpoint = require_checkpoint(args.run)
        model, tokenizer = load(args.run, device=world.device, checkpoint=checkpoint)
        held = read_held_out(args, config, tokenizer)
        how: dict[str, Any] = {
            "device": world.device,
            "arithmetic": partial(arithmetic, device_config, world.device),
        }
        record = evaluate(model, replace(held.windows, **how), args) | {
            "checkpoint": checkpoint.name,
            "data": held.data,
            "source": held.source,
            **({"by_corpus": by_corpus(model, held.parts, how, args)} if held.parts else {}),
            **provenance(),
        }
    files = [results.add(folder, record, IDENTITY, name)]
    if is_sweep:
        files.append(folder / "depth.png")
        plots.save_png(scores.depth_chart(results.read_depth(folder)), files[1])
    return results.printed(record, report(record, args.run), files, as_json=args.json)


def needs_decoding(args: ValidateArgs, config: TrainConfig) -> str:
    """Return the option, with its value, that needs token-by-token decoding; empty if none does."""
    if args.cache_rounds:
        return f"cache_rounds={' '.join(map(str, args.cache_rounds))}"
    slow = [rule for rule in args.adaptive if decodes_to_validate(config.model, rule)]
    return f"adaptive={slow[0]}" if slow else ""


@dataclass(frozen=True)
class HeldOut:
    """The held-out tokens and their source."""

    windows: Windows
    data: str
    """The folder, or the corpora of a mixture with their weights."""
    source: str
    parts: dict[str, Windows]
    """The windows of each corpus in a mixture."""


def read_held_out(args: ValidateArgs, config: TrainConfig, tokenizer: Tokenizer) -> HeldOut:
    """Read the corpus in --data, or the run's own validation data: a corpus, a mixture or conversations."""
    data, context, count = config.data, config.model.context, args.sequences
    if count is None:
        count = data.validation_rows if isinstance(data, ChatDataConfig) else data.validation_sequences
        if needs_decoding(args, config):  # a forward pass per token, as slow as generation
            count = min(MOST_DECODED, count)
    if args.data is None and isinstance(data, ChatDataConfig):
        chat = open_chat(data.path)
        check_tokenizer(chat.folder, chat.tokenizer_name, tokenizer, args.run)
        rows = held_out_rows(chat.validation, context, chat.end_of_text, count)
        return HeldOut(windows_of(config, tokenizer, *rows), str(chat.folder), chat.source, {})
    if args.data is None and data.mix:
        mixture = open_mixture(data)
        check_tokenizer(mixture.corpora[0].folder, mixture.tokenizer_name, tokenizer, args.run)
        pairs = mixture_windows(mixture, context, count)
        parts = {name: windows_of(config, tokenizer, *pair) for name, pair in pairs.items()}
        inputs, targets = (torch.cat(tensors) for tensors in zip(*pairs.values(), strict=True))
        source = "; ".join(corpus.source for corpus in mixture.corpora)
        name = " ".join(data.mix) + (f", last {' '.join(data.mix_last)}" if data.mix_last else "")
        return HeldOut(windows_of(config, tokenizer, inputs, targets), name, source, parts)
    corpus = Corpus.open(args.data or data.folders[0])
    check_tokenizer(corpus.folder, corpus.tokenizer_name, tokenizer, args.run)
    pair = validation_windows(corpus.validation, context, count)
    return HeldOut(windows_of(config, tokenizer, *pair), str(corpus.folder), corpus.source, {})


def windows_of(
    config: TrainConfig, tokenizer: Tokenizer, inputs: Tensor, targets: Tensor, starts: Tensor | None = None
) -> Windows:
    """Make windows with the size of their text; documents of a corpus start at end-of-text."""
    if starts is None and config.data.mask_documents:
        starts = inputs == tokenizer.end_of_text
    size = count_bytes(tokenizer, targets[targets >= 0])
    batch = config.device.micro_batch or config.optim.batch
    return Windows(inputs, targets, size, batch=batch, starts=starts)


def by_corpus(
    model: LoopedGPT, parts: dict[str, Windows], how: dict[str, Any], args: ValidateArgs
) -> list[dict[str, Any]]:
    """Score each corpus in a mixture at every number of rounds."""
    found = []
    for name, windows in parts.items():
        result = evaluate(model, replace(windows, **how), replace(args, adaptive=(), cache_rounds=()))
        found.append({"corpus": name, "sequences": result["sequences"], "rounds": result["rounds"]})
    return found


def read_budget(word: str) -> int | None:
    """Parse a key-value budget: a number of rounds, or all."""
    if word == "all":
        return None
    if not word.lstrip("-").isdecimal():
        raise ValueError(f"cache_rounds={word}: must be numbers of rounds, or all")
    return int(word)


def depths_up_to(trained: int) -> list[int]:
    """Return the fixed depths to compare adaptive depth with: all, or powers of two if there are many."""
    few = trained if trained <= 8 else 1
    return sorted({*range(1, few + 1), *(2**k for k in range(trained.bit_length())), trained})


def check(model: LoopedGPT, rules: Sequence[ExitRule], budgets: Sequence[int | None]) -> None:
    """Raise ValueError for rules and budgets that the model does not support; the cache stays unlimited."""
    for rule in rules:
        AdaptiveDepth(model, rule)
    for budget in (*budgets, None):
        model.set_cache_rounds(budget)


def evaluate(model: LoopedGPT, windows: Windows, args: ValidateArgs) -> dict[str, Any]:
    """Compute all requested scores, as plain values."""
    trained = model.config.rounds
    recompute = args.recompute_alpha or model.config.recompute_alpha
    rounds = sorted(set(args.rounds)) or (depths_up_to(trained) if args.adaptive else [trained])
    rules = [
        ExitRule(criterion, threshold)
        for criterion in args.adaptive
        for threshold in args.thresholds or THRESHOLDS[criterion]
    ]
    budgets = [read_budget(word) for word in dict.fromkeys(args.cache_rounds)]
    check(model, rules, budgets)
    scores = score_rounds(model, windows, rounds, recompute_alpha=recompute)
    adaptive: list[dict[str, Any]] = []
    for rule in rules:
        model.set_rounds(rounds[-1], recompute_alpha=recompute)
        mean, score = score_adaptive(model, windows, rule)
        line = between_depths({R: one.loss for R, one in scores.items()}, mean)
        adaptive.append({**asdict(rule), "mean_rounds": mean, "line": line, **asdict(score)})
    cache: list[dict[str, Any]] = []
    for budget in budgets:
        model.set_rounds(rounds[-1], recompute_alpha=recompute)
        cache.append({"cache_rounds": budget, **asdict(score_budget(model, windows, budget))})
    fixed = [{"rounds": R, **asdict(score)} for R, score in scores.items()]
    for row in (*fixed, *adaptive, *cache):
        if not math.isfinite(row["loss"]):
            R = row.get("rounds", rounds[-1])
            raise ValueError(f"rounds={R}: the loss is {row['loss']}; nothing was written")
    return {
        "trained_rounds": trained,
        "recompute_alpha": recompute,
        "asked": {
            "rounds": rounds,
            "adaptive": " ".join(args.adaptive) or "off",
            "thresholds": [row["threshold"] for row in adaptive],
            **({"cache_rounds": budgets} if budgets else {}),
        },
        "sequences": len(windows.inputs),
        "tokens": int((windows.targets >= 0).sum()),
        "bytes": windows.text_bytes,
        "rounds": fixed,
        "adaptive": adaptive,
        **({"cache": cache} if cache else {}),
    }


def report(record: dict[str, Any], run: Path) -> str:
    """Format the results for a terminal."""
    header = ("R", "loss", "bits/byte", "token sim.")
    names = {record["trained_rounds"]: f"{record['trained_rounds']} (trained)"}
    fixed = [(names.get(row["rounds"], str(row["rounds"])), *_figures(row)) for row in record["rounds"]]
    parts = [
        f"{run} at {record['checkpoint']}: {record['sequences']:,} "
        f"sequence{'s' * (record['sequences'] != 1)}, {record['tokens']:,} tokens, "
        f"{record['bytes']:,} bytes of {record['data']}",
        text_table(header, fixed),
    ]
    if rows := record["adaptive"]:
        most = record["rounds"][-1]["rounds"]
        parts.append(
            f"adaptive depth, at most {most} rounds; line: linear interpolation between fixed depths"
        )
        stopped = [
            (
                f"{row['criterion']} {row['threshold']:g}",
                f"{row['mean_rounds']:.2f}",
                "–" if row["line"] is None else f"{row['line']:.4f}",
                *_figures(row),
            )
            for row in rows
        ]
        parts.append(text_table(("stops by", "mean rounds", "line", *header[1:]), stopped))
    if rows := record.get("cache"):
        parts.append(f"decoded token by token, R = {record['rounds'][-1]['rounds']}:")
        kept = [
            (
                "all" if row["cache_rounds"] is None else str(row["cache_rounds"]),
                str(row["slots"]),
                f"{row['bytes_per_token']:,.0f}",
                *_figures(row),
            )
            for row in rows
        ]
        parts.append(text_table(("cache rounds", "slots", "bytes/token", *header[1:]), kept))
    if corpora := record.get("by_corpus"):
        rows = [
            (one["corpus"], f"{one['sequences']:,}", str(row["rounds"]), *_figures(row))
            for one in corpora
            for row in one["rounds"]
        ]
        parts.append(text_table(("corpus", "sequences", *header), rows))
    return "\n\n".join(parts)


def _figures(row: dict[str, Any]) -> tuple[str, str, str]:
    return f"{row['loss']:.4f}", f"{row['bits_per_byte']:.4f}", f"{row['similarity']:.2f}"
