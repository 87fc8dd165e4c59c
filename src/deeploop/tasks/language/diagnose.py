"""Diagnose the loop of a language model: κ_R, the residual stream and the effect of the last step.

`deeploop diagnose` writes diagnose.json and diagnose.png into the run folder. Several runs of one family at
different R also give γ and the exponent that it implies.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from deeploop.data.corpora import stdlib
from deeploop.data.shards import Corpus
from deeploop.data.token_loader import validation_windows
from deeploop.data.tokenizers import Tokenizer
from deeploop.diagnose.audit import Finding, audit_alpha, audit_beta, count_visits, problems
from deeploop.diagnose.conclusion import conclude
from deeploop.diagnose.examine import Effort, examine, pick_sublayers
from deeploop.diagnose.exponent import GammaFit, as_series, describe, fit_gamma, gamma_points, verdict
from deeploop.diagnose.perturbation import AdamState
from deeploop.diagnose.visit_grads import residual_sublayers
from deeploop.exits import memory_advice
from deeploop.files import resolve, write_json
from deeploop.models.gpt import LoopedGPT
from deeploop.models.gpt_config import PARTS, GPTConfig
from deeploop.nn.documents import document_bounds
from deeploop.report import plots, results
from deeploop.runs.folder import (
    OPTIMIZER,
    load_config,
    provenance,
    require_checkpoint,
    require_family,
    results_folder,
    step_of,
)
from deeploop.tasks.language import findings
from deeploop.tasks.language.config import TrainConfig
from deeploop.tasks.language.monitor import adam_state
from deeploop.tasks.language.text import mixture_windows, open_mixture
from deeploop.tasks.options import DiagnoseArgs
from deeploop.theory import ScalingRule
from deeploop.train.checkpoint import load_moments, read_whole_state
from deeploop.train.distributed import open_world
from deeploop.train.metrics import is_number, read_metrics
from deeploop.train.optim import learning_rate
from deeploop.train.rundir import check_tokenizer, load

PROBE_TOKENS = 1024
UNDER_MUON = (
    "Trained with Muon: its step is not linear in a visit's gradient or computable from its momentum.\n"
    "κ_R is that of raw gradients, and the effect of the last step is not measured."
)

HISTORY = {"kappa", "kappa_raw", "similarity"}  # fields that a line needs for the plot over training


def run(args: DiagnoseArgs) -> str:
    """Diagnose each run, write the results into its folder, and return the text to print."""
    configs = {path: load_config(path) for path in args.runs}
    require_family(configs, but="rounds")
    for path in args.runs:
        results.check_writable(results_folder(path))
    records, texts = {}, []
    for path, config in configs.items():
        record = records[path] = diagnose_run(path, config, args)
        history = [
            line
            for line in read_metrics(resolve(path), "diagnose")
            if line.get("rounds") == record["rounds"] and line.keys() >= HISTORY
        ]
        folder = results_folder(path)
        write_json(folder / "diagnose.json", record)
        plots.save_png(findings.alignment_chart(record, history), folder / "diagnose.png")
        text = findings.text(
            record,
            config.model,
            path,
            conclude(record, last_validation(path, record["step"])),
            has_alpha=alpha_rule(config.model) is not None,
        )
        text += f"\n\n{UNDER_MUON}" if config.optim.kind == "muon" else ""
        texts.append(f"{text}\n\nwritten: {folder / 'diagnose.json'}, diagnose.png")
    result: dict[str, Any] = {str(path): record for path, record in records.items()}
    if len({record["rounds"] for record in records.values()}) > 1:
        fits, gamma = gamma_report(records, configs)
        texts.append(gamma)
        result["gamma"] = {title: asdict(fit) for title, fit in fits.items()}
    return json.dumps(result, indent=1) if args.json else "\n\n".join(texts)


def last_validation(run: Path, step: int) -> dict[str, Any] | None:
    """The last validation up to that step that has a loss and a floor; None if there is none."""
    lines = read_metrics(resolve(run), "validation")
    sound = (line for line in lines if is_number(line.get("loss")) and is_number(line.get("floor")))
    return max((line for line in sound if line["step"] <= step), key=lambda line: line["step"], default=None)


def diagnose_run(path: Path, config: TrainConfig, args: DiagnoseArgs) -> dict[str, Any]:
    fewer = max(1, probe_sequences(config, args) // 2)
    advice = memory_advice(f"--device cpu, or --sequences {fewer}")
    with advice, open_world(replace(config.device, kind=args.device)) as world:
        model, tokenizer, state, step = weights_of(path, config, args.at, world.device)
        pick_sublayers(model, args.sublayers)
        tokens, targets, source = probe(path, config, tokenizer, args)
        apart = None
        if config.data.mask_documents:
            apart = document_bounds(tokens == tokenizer.end_of_text).to(world.device)
        tokens, targets = tokens.to(world.device), targets.to(world.device)
        wrong = audit(model, tokens, fresh=args.at == "init")
        parts = len(pick_sublayers(model, args.sublayers)) + (state is not None)
        print(f"{path}: measuring {parts} parts on {tokens.numel():,} tokens", file=sys.stderr, flush=True)
        with tqdm(total=parts, desc=path.name, disable=None, leave=False) as bar:

            def begin(name: str) -> None:
                bar.set_postfix_str(name)
                bar.update()

            record = examine(
                model,
                tokens,
                targets,
                documents=apart,
                sublayers=args.sublayers,
                state=state,
                effort=Effort(args.iterations, args.tolerance),
                progress=begin,
            )
    return record | {"step": step, "probe": source, "audit": [str(one) for one in wrong], **provenance()}


def weights_of(
    path: Path, config: TrainConfig, at: str, device: torch.device
) -> tuple[LoopedGPT, Tokenizer, AdamState | None, int]:
    """The model and its optimizer's state at the last checkpoint, or the initial model."""
    checkpoint = require_checkpoint(path)
    model, tokenizer = load(path, device=device, checkpoint=checkpoint)
    if at == "init" and config.init_from is not None:
        raise ValueError(f"{path}: began with the weights of {config.init_from}; diagnose that run instead")
    if at == "init":
        fresh = LoopedGPT(config.model, seed=config.seed)
        if config.model.unigram_bias:
            fresh.set_unigram_bias(torch.from_numpy(open_mixture(config.data).counts()))
        return fresh.to(device).eval(), tokenizer, None, 0
    step = step_of(checkpoint)
    # Muon's step is not Adam's, and a frozen loop was not trained.
    if config.optim.kind == "muon" or config.gate.stage == "gate-only":
        return model, tokenizer, None, step
    saved = read_whole_state(checkpoint, [OPTIMIZER])
    # Older checkpoints have no rate; it followed from the schedule.
    scheduled = learning_rate(step - 1, config.optim) * config.model.matrix_lr_multiplier
    settings = {**vars(config.optim), "lr": saved.get("lr", scheduled)}
    # Weights published without their optimizer have no moments.
    return model, tokenizer, adam_state(load_moments(checkpoint, model), settings), step


def probe(
    run: Path, config: TrainConfig, tokenizer: Tokenizer, args: DiagnoseArgs
) -> tuple[Tensor, Tensor, str]:
    """Inputs and targets (B, T) from the start of the validation set, and a description of their source.

    Each corpus of a mixture gives its share, at least one sequence.
    """
    context = config.model.context
    count = probe_sequences(config, args)
    if args.data is None and not all((path / "corpus.json").is_file() for path in config.data.folders):
        return *stdlib_windows(tokenizer, context, count), "Python's standard library"
    if args.data is None and config.data.mix:
        mixture = open_mixture(config.data)
        check_tokenizer(mixture.corpora[0].folder, mixture.tokenizer_name, tokenizer, run)
        pairs = mixture_windows(mixture, context, count).values()
        inputs, targets = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        return inputs, targets, " ".join(config.data.mix)
    path = args.data or config.data.folders[0]
    corpus = Corpus.open(path)
    check_tokenizer(corpus.folder, corpus.tokenizer_name, tokenizer, run)
    inputs, targets = validation_windows(
        corpus.validation, context, max(count, config.data.validation_sequences)
    )
    return inputs[:count], targets[:count], str(path)


def probe_sequences(config: TrainConfig, args: DiagnoseArgs) -> int:
    return args.sequences or -(-PROBE_TOKENS // config.model.context)


def stdlib_windows(tokenizer: Tokenizer, context: int, count: int) -> tuple[Tensor, Tensor]:
    ids: list[int] = []
    for text in stdlib():
        ids += [tokenizer.end_of_text, *tokenizer.encode(text)]
        if len(ids) > count * context:
            break
    windows = torch.tensor(ids[: count * context + 1])
    return windows[:-1].view(count, context), windows[1:].view(count, context)


def audit(model: LoopedGPT, tokens: Tensor, *, fresh: bool) -> list[Any]:
    """Check the loop for faults. The standard deviations of matrices are checked only at initialization."""
    parts = {"blocks": model.config} | {
        name: model.config.part(name) for name in PARTS if getattr(model.config, name)
    }
    findings = []
    for part, config in parts.items():
        blocks = {f"{part}.{k}": block for k, block in enumerate(getattr(model, part))}
        rounds = model.rounds if part == "blocks" else 1
        visits = count_visits(blocks, lambda: model(tokens[:1]))
        findings += [
            Finding(f"visits of {name}", str(rounds), str(count), count == rounds)
            for name, count in visits.items()
        ]
        if rule := alpha_rule(config):
            findings += audit_alpha(model, rule, lambda: model(tokens[:1]), within=f"{part}.")
    if fresh:
        matrices = {
            f"{sublayer.name}.{name}": (
                sublayer.module.get_parameter(name),
                parts[sublayer.name.partition(".")[0]].init_rule.std(name.split(".")[-2]),
            )
            for sublayer in residual_sublayers(model)
            for name in sublayer.parameters
        }
        findings += audit_beta(matrices)
    return problems(findings)


def alpha_rule(config: GPTConfig) -> ScalingRule | Callable[[int, int], float] | None:
    """The rule that a model's α must follow; None for a model without α."""
    rule = config.residual
    if rule.law or not rule.has_alpha:
        return rule.law
    return lambda K, R: replace(config, blocks=K, rounds=R).scales.alpha


def gamma_report(
    records: dict[Path, dict[str, Any]], configs: dict[Path, TrainConfig]
) -> tuple[dict[str, GammaFit], str]:
    """Fit γ over the runs by each sublayer's own κ and by the paper's κ_R; return the fits and a text."""
    points = gamma_points([(config.seed, records[path]) for path, config in configs.items()])
    fits = {title: fit_gamma(own) for title, own in points.items()}
    target = results_folder(next(iter(records))) / "gamma.png"
    plots.save_png(findings.gamma_chart(as_series(points["own κ"]), "own κ", fits["own κ"].gamma), target)
    lines = [f"{title}: {describe(fit)}" for title, fit in fits.items()]
    return fits, "\n".join(
        ["γ of κ ~ R^γ over these runs", *lines, verdict(fits["own κ"], "own κ"), f"written: {target}"]
    )
