"""`deeploop eval` for language models, with lm-evaluation-harness on this machine or on another one.

With the harness beside the run it takes one command. Otherwise it takes three, and only the first and last
need the harness: write the requests (`--requests FILE`), score them (`RUN --requests FILE`) and judge the
scores (`--scores FILE`).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deeploop.data.bpe import find_tokenizer, how_to_ask, load_tokenizer
from deeploop.eval.requests import Requests, Scores, load_scores, save_scores
from deeploop.eval.scoring import default_batch_tokens, fitting, input_lengths, score
from deeploop.eval.tasks import deviations, load_tasks, require_examples
from deeploop.exits import memory_advice
from deeploop.files import resolve
from deeploop.models.gpt import LoopedGPT
from deeploop.report import plots, results
from deeploop.runs.folder import load_config, provenance, require_checkpoint, results_folder, tokenizer_name
from deeploop.tasks.language import scores
from deeploop.tasks.options import EvalArgs
from deeploop.train.distributed import arithmetic, how_computed, open_world
from deeploop.train.rundir import load_model


def evaluate_run(args: EvalArgs, folder: Path) -> str:
    """Write, score and judge the requests in one step."""
    results.check(results_folder(folder))
    with open_session(args, folder) as session:
        from deeploop.eval.harness import HarnessLM

        tokenizer = load_tokenizer(session.tokenizer, resolve(folder))
        lm = HarnessLM(tokenizer, session.score, session.model)
        rows, notes = ask_harness(lm, args.settings, session.rounds, session.scorer_at)
        return finish(args, results_folder(folder), args.settings, session.stamp(), rows, notes)


def write_requests(args: EvalArgs, path: Path) -> str:
    """Write the requests to a file (step 1 of 3)."""
    from deeploop.eval.harness import HarnessLM, Recorder

    if path.exists():
        raise ValueError(f"requests={path}: is already there; name a run folder to score it, or another file")
    recorder = Recorder()
    lm = HarnessLM(find_tokenizer(args.tokenizer), recorder)
    ask_harness(lm, args.settings, [0], lambda _: recorder)
    requests = Requests.join(recorder.asked, args.settings)
    requests.save(path)
    return (
        f"written: {path}, {len(requests):,} requests of {requests.items:,} items, "
        f"{path.stat().st_size / 1e6:.1f} MB\n"
        f"next, where the run is (it needs no harness): deeploop eval RUN --requests {path}"
    )


def score_requests(args: EvalArgs, folder: Path, path: Path) -> str:
    """Score the requests in a file (step 2 of 3), without the harness or a tokenizer."""
    requests = Requests.load(path)
    with open_session(args, folder) as session:
        if session.tokenizer != requests.tokenizer:
            raise ValueError(
                f"requests={path}: holds {requests.tokenizer} tokens, the run was trained on "
                f"{session.tokenizer}; write them with --tokenizer {how_to_ask(session.tokenizer, folder)}"
            )
        parts = [requests.with_shots(shots) for shots in requests.shots]
        digests = [part.digest() for part in parts]
        answers = {
            R: dict(zip(digests, map(session.scorer_at(R), parts), strict=True)) for R in session.rounds
        }
        stamp = session.stamp()
    out = results_folder(folder) / "scores.npz"
    save_scores(out, {"settings": requests.settings, "stamp": stamp}, answers)
    data = requests.settings.get("data")
    return (
        f"{scores.speed(stamp, requests.items)}\nwritten: {out}\n"
        f"next, where the harness is: deeploop eval --scores {out}" + (f" --data {data}" if data else "")
    )


def judge_scores(args: EvalArgs, path: Path) -> str:
    """Run the harness again with the scores from a file (step 3 of 3)."""
    from deeploop.eval.harness import HarnessLM, ScoreReplay

    meta, answers = load_scores(path)
    try:
        settings, stamp = checked_settings(meta["settings"]), dict(meta["stamp"])
        tokenizer = load_tokenizer(stamp["tokenizer"], path.parent)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a file of scores ({error})") from None
    if args.data:
        settings["data"] = str(args.data)
    replays = {R: ScoreReplay(scores) for R, scores in answers.items()}
    lm = HarnessLM(tokenizer, replays[min(replays)])
    rows, notes = ask_harness(lm, settings, sorted(replays), replays.__getitem__)
    return finish(args, path.parent, settings, stamp, rows, notes)


def checked_settings(saved: Any) -> dict[str, Any]:
    """Check the harness settings in a file of scores."""
    settings = dict(saved)
    for name in ("tasks", "shots"):
        kind = str if name == "tasks" else int
        if not settings[name] or any(type(value) is not kind for value in settings[name]):
            raise ValueError(f"settings.{name}: {settings[name]!r:.40}")
    for name, kinds in (("limit", (int, type(None))), ("data", (str, type(None)))):
        if type(settings[name]) not in kinds:
            raise ValueError(f"settings.{name}: {settings[name]!r:.40}")
    return settings


def ask_harness(
    lm: Any, settings: dict[str, Any], rounds: list[int], scorer_at: Callable[[int], Any]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return one result for each number of rounds and shots and each task, and the deviations of the data."""
    from deeploop.eval.harness import run_tasks, set_shots

    data = None if settings["data"] is None else Path(settings["data"])
    rows, notes = [], []
    for shots in settings["shots"]:
        loaded = set_shots(load_tasks(settings["tasks"], data), shots)
        if data is not None:
            require_examples(loaded["tasks"], data, shots)
        notes = deviations(loaded["tasks"], data, settings["shots"])
        for R in rounds:
            lm.scorer = scorer_at(R)
            results = run_tasks(lm, loaded, shots=shots, limit=settings["limit"])
            rows += [{"rounds": R, **row} for row in results]
    return sorted(rows, key=lambda row: (row["shots"], row["rounds"])), notes


def finish(
    args: EvalArgs,
    folder: Path,
    settings: dict[str, Any],
    stamp: dict[str, Any],
    rows: list[dict[str, Any]],
    notes: list[str],
) -> str:
    """Write the result into the folder and return the text to print."""
    from deeploop.eval.harness import harness_version

    record = {
        **settings,
        **stamp,
        "average": scores.averages(rows),
        "results": rows,
        "deviations": notes + scores.deviations(settings, stamp) + scores.left_out(rows),
        "lm_eval": harness_version(),
        **provenance(),
    }
    files = [results.add(folder, record, scores.IDENTITY)]
    if len(record["rounds"]) > 1 and record["average"]:
        files.append(folder / "accuracy.png")
        plots.save_png(scores.accuracy_chart(record, results.read_depth(folder)), files[1])
    return results.printed(record, scores.report(folder, record), files, as_json=args.json)


@dataclass
class Session:
    """A run's model on its device, with counts of the requests scored so far."""

    model: LoopedGPT
    tokenizer: str
    checkpoint: str
    rounds: list[int]
    recompute_alpha: bool
    batch_tokens: int
    device: torch.device
    arithmetic: Callable[[], AbstractContextManager[object]]
    requests: int = 0
    cut: int = 0
    seconds: float = 0.0

    def scorer_at(self, R: int) -> Callable[[Requests], Scores]:
        self.model.set_rounds(R, recompute_alpha=self.recompute_alpha)
        return self.score

    def score(self, requests: Requests) -> Scores:
        start = time.perf_counter()
        scores = score(
            self.model,
            requests,
            batch_tokens=self.batch_tokens,
            device=self.device,
            arithmetic=self.arithmetic,
            progress=True,
        )
        self.seconds += time.perf_counter() - start
        self.requests += len(requests)
        context = self.model.config.context
        self.cut += int((fitting(requests, context) & (input_lengths(requests) > context)).sum())
        return scores

    def stamp(self) -> dict[str, Any]:
        """The run and the options that the scores depend on."""
        return {
            "checkpoint": self.checkpoint,
            "trained_rounds": self.model.config.rounds,
            "rounds": self.rounds,
            "recompute_alpha": self.recompute_alpha,
            "tokenizer": self.tokenizer,
            "context": self.model.config.context,
            **how_computed(self.device, self.arithmetic),
            "batch_tokens": self.batch_tokens,
            "requests": self.requests,
            "cut_requests": self.cut,
            "seconds": round(self.seconds, 3),
            "scored_by": provenance(),
        }


@contextmanager
def open_session(args: EvalArgs, folder: Path) -> Iterator[Session]:
    device_config = replace(load_config(folder).device, kind=args.device)
    with open_world(device_config) as world:
        batch_tokens = args.batch_tokens or default_batch_tokens(world.device)
        with memory_advice(f"--batch-tokens {max(1, batch_tokens // 2)}"):
            checkpoint = require_checkpoint(folder)
            model = load_model(folder, device=world.device, checkpoint=checkpoint)
            rounds = sorted(set(args.rounds)) or [model.config.rounds]
            model.set_rounds(rounds[0])  # raises for an invalid number before any work
            yield Session(
                model,
                tokenizer_name(folder),
                checkpoint.name,
                rounds,
                args.recompute_alpha or model.config.recompute_alpha,
                batch_tokens,
                world.device,
                partial(arithmetic, device_config, world.device),
            )
