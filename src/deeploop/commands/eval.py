"""`deeploop eval`: the accuracy of a run.

A language model's on the paper's eight tasks or any other of the lm-evaluation-harness, a reasoner's on its
puzzles, an iterated task's at more and more steps: `evaluate.py` of each task.
"""

from dataclasses import fields

from deeploop.runs.folder import read_stamp
from deeploop.tasks.iterate.options import IteratedOptions
from deeploop.tasks.options import EvalArgs
from deeploop.tasks.puzzles.options import ReasonerOptions

REASONERS = ("hrm", "trm")
OF_LANGUAGE = ("tasks", "shots", "rounds", "recompute_alpha", "requests", "batch_tokens")
ITERATED = "iterate"
OF_REASONERS = tuple(own.name for own in fields(ReasonerOptions))
OF_ITERATED = tuple(own.name for own in fields(IteratedOptions))


def run(args: EvalArgs) -> str:
    """Does what the arguments ask for; returns what to print."""
    from deeploop.tasks.iterate import evaluate as iterated
    from deeploop.tasks.language import evaluate as language
    from deeploop.tasks.puzzles import evaluate as puzzles

    if args.run is None:
        refuse(args.reasoner, OF_REASONERS, "for reasoners; name the folder of a run")
        refuse(args.iterated, OF_ITERATED, "for iterated tasks; name the folder of a run")
        if args.scores:
            return language.judge_scores(args, args.scores)
        if args.requests:
            return language.write_requests(args, args.requests)
        raise ValueError("run: name a run folder, or write requests without one: --requests FILE")
    task = read_stamp(args.run).get("task")
    if task != ITERATED:
        refuse(args.iterated, OF_ITERATED, f"for iterated tasks; {args.run} is a run of another kind")
    if task == ITERATED:
        others = ("tasks", "shots", "requests", "batch_tokens", "data")
        refuse(args, others, f"for other runs; {args.run} is a run of an iterated task")
        refuse(args.reasoner, OF_REASONERS, f"for reasoners; {args.run} is a run of an iterated task")
        return iterated.run(
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
        return puzzles.run(
            args.run,
            args.reasoner,
            data=args.data,
            limit=args.limit,
            device=args.device,
            as_json=args.json,
        )
    refuse(args.reasoner, OF_REASONERS, f"for reasoners; {args.run} is a run of a language model")
    if args.requests:
        return language.score_requests(args, args.run, args.requests)
    return language.evaluate_run(args, args.run)


def refuse(options: EvalArgs | ReasonerOptions | IteratedOptions, names: tuple[str, ...], why: str) -> None:
    """Raise where one of the named options was given."""
    for own in fields(options):
        if own.name in names and getattr(options, own.name) != own.default:
            raise ValueError(f"--{own.name.replace('_', '-')}: {why}")
