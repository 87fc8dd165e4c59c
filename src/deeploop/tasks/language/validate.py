"""The validation loss of a run, at any depth and on any corpus with its tokenizer: `deeploop validate`.

The result is added to validation.json in the run folder. Several rounds or adaptive depth make it a sweep
over test-time depth, written to depth.json, with all comparable results in depth.png.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
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
    return results.printed(record, scores.validation_report(args.run, record), files, as_json=args.json)


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
    results = {
        name: evaluate(model, replace(windows, **how), replace(args, adaptive=(), cache_rounds=()))
        for name, windows in parts.items()
    }
    return [
        {"corpus": name, "sequences": result["sequences"], "rounds": result["rounds"]}
        for name, result in results.items()
    ]


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
    by_rounds = score_rounds(model, windows, rounds, recompute_alpha=recompute)
    losses = {R: score.loss for R, score in by_rounds.items()}
    fixed = [{"rounds": R, **asdict(score)} for R, score in by_rounds.items()]
    adaptive: list[dict[str, Any]] = []
    for rule in rules:
        model.set_rounds(rounds[-1], recompute_alpha=recompute)
        mean, score = score_adaptive(model, windows, rule)
        line = between_depths(losses, mean)
        adaptive.append({**asdict(rule), "mean_rounds": mean, "line": line, **asdict(score)})
    cache: list[dict[str, Any]] = []
    for budget in budgets:
        model.set_rounds(rounds[-1], recompute_alpha=recompute)
        cache.append({"cache_rounds": budget, **asdict(score_budget(model, windows, budget))})
    _require_finite([*fixed, *adaptive, *cache], rounds[-1])
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


def _require_finite(rows: list[dict[str, Any]], most: int) -> None:
    """Raise ValueError for a loss that is not finite; rows without `rounds` have at most that many."""
    for row in rows:
        if not math.isfinite(row["loss"]):
            R = row.get("rounds", most)
            raise ValueError(f"rounds={R}: the loss is {row['loss']}; nothing was written")
