"""`deeploop eval`: a run on the paper's eight tasks, or on any other of the lm-evaluation-harness.

`eval_language.py` does that. A reasoner's run is solved on its own puzzles instead (`eval_reasoner.py`), and
an iterated task's is asked for more and more steps (`eval_iterated.py`).
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from tyro.conf import OmitArgPrefixes, Positional

from deeploop.commands.parsing import run_command
from deeploop.eval.tasks import PAPER_TASKS

REASONERS = ("hrm", "trm")
OF_LANGUAGE = ("tasks", "shots", "rounds", "recompute_alpha", "requests", "batch_tokens")
ITERATED = "iterate"


@dataclass(frozen=True, kw_only=True)
class ReasonerOptions:
    """Options for the run of a reasoner (HRM, TRM)."""

    halt: bool = False
    """Let each puzzle stop when the model says so; else it gets all segments, as published."""
    views: int | None = None
    """ARC: views of a task that vote, the task as it is among them; unset: all."""
    batch: int | None = None
    """Puzzles computed at once; unset: 512 on a GPU, 64 on a CPU."""
    gallery: int | None = None
    """ARC: tasks in gallery.html, 0 for none; unset: 60."""

    def __post_init__(self) -> None:
        for name, least in (("views", 1), ("batch", 1), ("gallery", 0)):
            if (value := getattr(self, name)) is not None and value < least:
                raise ValueError(f"{name}={value}: must be at least {least}")


@dataclass(frozen=True, kw_only=True)
class IteratedOptions:
    """Options for the run of an iterated task."""

    steps: tuple[int, ...] = ()
    """Steps to ask for, also more than were trained; unset: those of the run's validation."""
    rule: int | None = None
    """Another rule of the automaton than the trained one."""
    length: int | None = None
    """Another size than the trained one, such as longer rows."""

    def __post_init__(self) -> None:
        if self.steps and min(self.steps) < 1:
            raise ValueError(f"steps={min(self.steps)}: must be at least 1")


OF_REASONERS = tuple(own.name for own in fields(ReasonerOptions))
OF_ITERATED = tuple(own.name for own in fields(IteratedOptions))


@dataclass(frozen=True, kw_only=True)
class EvalArgs:
    """Accuracy of a run: a language model's on the paper's eight tasks, or others of lm-evaluation-harness; a
    reasoner's on the test split of its puzzles, on ARC with votes over the views of each task; an iterated
    task's at any number of steps and rounds."""

    run: Positional[Path | None] = None
    """Run folder, as `deeploop train` writes it; unset: --requests are written, or --scores judged."""
    tasks: tuple[str, ...] = ()
    """Tasks of the harness; unset: the paper's eight."""
    shots: tuple[int, ...] = ()
    """Examples in front of each question; unset: 0 and 1."""
    limit: int | None = None
    """So many documents of each task, the first; puzzles, evenly spread; instances of an iterated task."""
    data: Path | None = None
    """Folder of <task>/<split>.jsonl (unset: download), or of a reasoner's puzzles (unset: as trained)."""
    rounds: tuple[int, ...] = ()
    """Rounds R to evaluate at; several make a picture. Unset: as trained, or as the steps ask."""
    recompute_alpha: bool = False
    """Take alpha of each depth instead of the trained one."""
    requests: Path | None = None
    """Without a run: write the tokenized requests to this file. With one: score those in the file."""
    scores: Path | None = None
    """Judge scores that were made from a file of requests; the result is written beside them."""
    tokenizer: str = "gpt2"
    """Tokenizer of the requests that are written, or a folder that has it; with a run it is the run's."""
    batch_tokens: int | None = None
    """Tokens computed at once, padding included; unset: 65536 on a GPU, 4096 on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on."""
    json: bool = False
    """Print the result as JSON."""
    reasoner: OmitArgPrefixes[ReasonerOptions] = field(default_factory=ReasonerOptions)
    iterated: OmitArgPrefixes[IteratedOptions] = field(default_factory=IteratedOptions)

    def __post_init__(self) -> None:
        for name in ("limit", "batch_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        if any(shots < 0 for shots in self.shots):
            raise ValueError(f"shots={min(self.shots)}: must be 0 or more")
        given = [name for name in ("tasks", "shots", "limit") if getattr(self, name)]
        if self.scores and (self.run or self.requests):
            raise ValueError("scores: stand alone; leave the run folder and --requests out")
        if given and (self.scores or (self.run and self.requests)):
            raise ValueError(f"{given[0]}: the file says which requests there are; leave --{given[0]} out")

    @property
    def settings(self) -> dict[str, Any]:
        """What the harness is asked for."""
        return {
            "tasks": list(dict.fromkeys(self.tasks or PAPER_TASKS)),
            "shots": sorted(set(self.shots or (0, 1))),
            "limit": self.limit,
            "data": None if self.data is None else str(self.data),
        }


def run(args: EvalArgs) -> str:
    """Does what the arguments ask for; returns what to print."""
    # Now: these wait for torch, --help does not.
    from deeploop.commands import eval_iterated, eval_language, eval_reasoner
    from deeploop.runs.folder import read_stamp

    if args.run is None:
        refuse(args.reasoner, OF_REASONERS, "for reasoners; name the folder of a run")
        refuse(args.iterated, OF_ITERATED, "for iterated tasks; name the folder of a run")
        if args.scores:
            return eval_language.judge_scores(args, args.scores)
        if args.requests:
            return eval_language.write_requests(args, args.requests)
        raise ValueError("run: name a run folder, or write requests without one: --requests FILE")
    task = read_stamp(args.run).get("task")
    if task != ITERATED:
        refuse(args.iterated, OF_ITERATED, f"for iterated tasks; {args.run} is a run of another kind")
    if task == ITERATED:
        others = ("tasks", "shots", "requests", "batch_tokens", "data")
        refuse(args, others, f"for other runs; {args.run} is a run of an iterated task")
        refuse(args.reasoner, OF_REASONERS, f"for reasoners; {args.run} is a run of an iterated task")
        return eval_iterated.run(
            args.run,
            args.iterated,
            rounds=args.rounds,
            recompute_alpha=args.recompute_alpha,
            limit=args.limit,
            device=args.device,
            as_json=args.json,
        )
    if task in REASONERS:
        refuse(args, OF_LANGUAGE, f"for language models; {args.run} is a run of {task}")
        return eval_reasoner.run(
            args.run,
            args.reasoner,
            data=args.data,
            limit=args.limit,
            device=args.device,
            as_json=args.json,
        )
    refuse(args.reasoner, OF_REASONERS, f"for reasoners; {args.run} is a run of a language model")
    if args.requests:
        return eval_language.score_requests(args, args.run, args.requests)
    return eval_language.evaluate_run(args, args.run)


def refuse(options: EvalArgs | ReasonerOptions | IteratedOptions, names: tuple[str, ...], why: str) -> None:
    """Raises where one of the named options was given."""
    for own in fields(options):
        if own.name in names and getattr(options, own.name) != own.default:
            raise ValueError(f"--{own.name.replace('_', '-')}: {why}")


def main(arguments: list[str]) -> int:
    return run_command(EvalArgs, run, arguments, prog="deeploop eval")
