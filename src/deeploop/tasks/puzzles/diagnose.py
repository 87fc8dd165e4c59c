"""Diagnose the alignment of the visits to HRM's and TRM's modules: `deeploop diagnose` for a reasoner.

Writes diagnose.json into the run folder. Several runs at different C_L give γ along C_L.
"""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from deeploop.diagnose.examine import Effort
from deeploop.diagnose.exponent import GammaFit, Point, describe, fit_gamma
from deeploop.diagnose.reasoner import Probe, examine_reasoner, pick_module_sublayers
from deeploop.exits import memory_advice
from deeploop.files import write_json
from deeploop.models.reasoner import Reasoner
from deeploop.models.reasoner_config import ReasonerConfig
from deeploop.report import results
from deeploop.report.tables import text_table
from deeploop.runs.folder import (
    load_reasoner_config,
    provenance,
    puzzle_shape,
    require_checkpoint,
    require_family,
    results_folder,
    step_of,
)
from deeploop.tasks.options import DiagnoseArgs
from deeploop.tasks.puzzles.config import ReasonerTrainConfig
from deeploop.tasks.puzzles.data.sets import open_puzzles
from deeploop.tasks.puzzles.load import load_reasoner
from deeploop.tasks.puzzles.scoring import spread_rows
from deeploop.theory import Horizon
from deeploop.train.distributed import open_world

PROBE_POSITIONS = 1024
LEGEND = (
    "κ_g is Eq. (kappa-def) over a module's visits in the training graph, at most R_g; with one visit it\n"
    "is at most 1 and implies p ≥ 1/4. κ̄_g is Eq. (hrm-cond), the bound Eq. (hrm-per-module-bound) up to a\n"
    "constant. The exponent is (1 + γ)/4 with γ = log κ_g / log R_g. Updates are raw gradients of the\n"
    "first segment."
)
Record = dict[str, Any]


def run(args: DiagnoseArgs) -> str:
    """Diagnose each run, write the results into its folder, and return the text to print."""
    configs = {path: load_reasoner_config(path) for path in args.runs}
    require_family(configs, but="low_cycles")
    for path in args.runs:
        results.check_writable(results_folder(path))
    records, texts = {}, []
    for path, config in configs.items():
        record = records[path] = diagnose_run(path, config, args)
        write_json(results_folder(path) / "diagnose.json", record)
        texts.append(
            f"{text(path, config.model, record)}\n\nwritten: {results_folder(path) / 'diagnose.json'}"
        )
    result: dict[str, Any] = {str(path): record for path, record in records.items()}
    if len({config.model.low_cycles for config in configs.values()}) > 1:
        fits = gamma_along_low_cycles(records, configs)
        result["gamma"] = {name: asdict(fit) for name, fit in fits.items()}
        texts.append(
            "\n".join(f"{name} against C_L, last_cycle: {describe(fit)}" for name, fit in fits.items())
            + "\nthe paper's aligned case is γ = 1, p ≥ 0.50"
        )
    return json.dumps(result, indent=1) if args.json else "\n\n".join(texts)


def diagnose_run(path: Path, config: ReasonerTrainConfig, args: DiagnoseArgs) -> Record:
    """Measure κ_g at the run's own horizon, and over the last cycle as in the paper."""
    checkpoint = require_checkpoint(path)
    advice = memory_advice("--device cpu, or fewer --sequences")
    with advice, open_world(replace(config.device, kind=args.device)) as world:
        model, _ = load_reasoner(path, device=world.device, checkpoint=checkpoint)
        step = step_of(checkpoint)
        if args.at == "init":
            if config.init_from is not None:
                raise ValueError(
                    f"{path}: started from the weights of {config.init_from}; diagnose that run instead"
                )
            model, step = Reasoner(config.model, puzzle_shape(path), seed=config.seed), 0
            model = model.to(world.device)
        pick_module_sublayers(model, args.sublayers)
        probe, source = read_probe(model, config, args, world.device)
        horizons: list[Horizon] = [*dict.fromkeys((config.model.horizon, "last_cycle"))]
        print(f"{path}: measuring {len(probe.tokens)} puzzles", file=sys.stderr, flush=True)
        measured = {
            horizon: examine_reasoner(
                model,
                probe,
                horizon=horizon,
                sublayers=args.sublayers,
                effort=Effort(args.iterations, args.tolerance),
            )
            for horizon in horizons
        }
    return {"step": step, "probe": source, "puzzles": len(probe.tokens), "horizons": measured, **provenance()}


def read_probe(
    model: Reasoner, config: ReasonerTrainConfig, args: DiagnoseArgs, device: torch.device
) -> tuple[Probe, str]:
    """Held-out puzzles, spread evenly over the split, and a description of their source."""
    folder = args.data or config.data.path
    puzzles = open_puzzles(folder, "data")
    if puzzles.shape != model.shape:
        raise ValueError(
            f"data={folder}: puzzles of shape {tuple(puzzles.shape)}, the run has {tuple(model.shape)}"
        )
    count = args.sequences or -(-PROBE_POSITIONS // model.positions)
    tokens, labels, ids = (
        torch.from_numpy(rows).long().to(device) for rows in spread_rows(puzzles.test, count)
    )
    return Probe(tokens, labels, model.puzzle_rows(ids)), str(folder)


def text(path: Path, model: ReasonerConfig, record: Record) -> str:
    """Format the record of one run as text, with a table for each horizon."""
    rules = {m: f"{model.rule_of(m).title}, α = {model.scales_of(m).alpha:.4g}" for m in model.blocks_of}
    rule = (
        next(iter(rules.values()))
        if len(set(rules.values())) == 1
        else "; ".join(map(": ".join, rules.items()))
    )
    parts = [
        f"{path} at step {record['step']}: {rule} at N = {model.N}, C_L = {model.low_cycles}; "
        f"{record['puzzles']} puzzles of {record['probe']}"
    ]
    for horizon, measured in record["horizons"].items():
        trained = "as trained" if horizon == model.horizon else "the paper's, not as trained"
        rows = [
            (
                f"κ_g({name})",
                str(module["R_g"]),
                f"{module['kappa']:.3f}",
                f"{max(one['own_kappa'] for one in module['sublayers'].values()):.3f}",
                f"{module['exponent']:.2f}",
            )
            for name, module in measured["modules"].items()
        ]
        header = (f"{horizon} ({trained})", "R_g", "κ_g", "largest of one sublayer", "implies p ≥")
        bound = "none, for its rule has no p" if measured["bound"] is None else f"{measured['bound']:.4g}"
        parts += [text_table(header, rows), f"κ̄_g = {measured['kappa_bar']:.3f}; bound {bound}"]
    return "\n\n".join([*parts, LEGEND])


def gamma_along_low_cycles(
    records: dict[Path, Record], configs: dict[Path, ReasonerTrainConfig]
) -> dict[str, GammaFit]:
    """γ of each module's κ_g and of its sublayers' own κ over C_L, with the last cycle in the graph."""
    points: dict[str, list[Point]] = {}
    for path, config in configs.items():
        C_L, seed = config.model.low_cycles, f"seed {config.seed}"
        for name, module in records[path]["horizons"]["last_cycle"]["modules"].items():
            points.setdefault(f"κ_g({name})", []).append(Point(C_L, module["kappa"], seed))
            points.setdefault(f"own κ of {name}'s sublayers", []).extend(
                Point(C_L, one["own_kappa"], f"{sublayer}, {seed}")
                for sublayer, one in module["sublayers"].items()
            )
    return {name: fit_gamma(series) for name, series in points.items()}
