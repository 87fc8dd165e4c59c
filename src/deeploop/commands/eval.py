"""`deeploop eval`: the accuracy of a run.

A language model is scored on the paper's eight tasks or any other of lm-evaluation-harness, a reasoner on its
puzzles, an iterated task at growing numbers of steps: `evaluate.py` of each task.
"""

from dataclasses import fields

from deeploop.runs.folder import read_stamp
from deeploop.tasks.options import EvalArgs, IteratedOptions
from deeploop.tasks.puzzles.options import ReasonerOptions

LANGUAGE, REASONERS, ITERATED = "language models", "reasoners", "iterated tasks"
KINDS = {"hrm": REASONERS, "trm": REASONERS, "iterate": ITERATED}  # all others are language models
# The kinds of runs that an option is for; one that is not here is for all.
OWNERS = {
    **dict.fromkeys(("tasks", "shots", "requests", "batch_tokens"), (LANGUAGE,)),
    **dict.fromkeys(("rounds", "recompute_alpha"), (LANGUAGE, ITERATED)),
    "data": (LANGUAGE, REASONERS),
    **dict.fromkeys((own.name for own in fields(ReasonerOptions)), (REASONERS,)),
    **dict.fromkeys((own.name for own in fields(IteratedOptions)), (ITERATED,)),
}


def run(args: EvalArgs) -> str:
    """Do what the arguments ask for; return what to print."""
    from deeploop.tasks.iterate import evaluate as iterated
    from deeploop.tasks.language import evaluate as language
    from deeploop.tasks.puzzles import evaluate as puzzles

    kind = LANGUAGE if args.run is None else KINDS.get(str(read_stamp(args.run).get("task")), LANGUAGE)
    check_options(args, kind)
    if kind != LANGUAGE:
        return (iterated if kind == ITERATED else puzzles).run(args)
    if args.run is not None:
        return (
            language.score_requests(args, args.run, args.requests)
            if args.requests
            else language.evaluate_run(args, args.run)
        )
    if args.scores:
        return language.judge_scores(args, args.scores)
    if args.requests:
        return language.write_requests(args, args.requests)
    raise ValueError("run: name a run folder, or write requests without one: --requests FILE")


def check_options(args: EvalArgs, kind: str) -> None:
    """Raise ValueError for an option that is for other kinds of runs."""
    where = f"{args.run} is another kind of run ({kind})" if args.run else "name the folder of a run"
    for options in (args, args.reasoner, args.iterated):
        for own in fields(options):
            owners = OWNERS.get(own.name, (kind,))
            if kind not in owners and getattr(options, own.name) != own.default:
                raise ValueError(f"--{own.name.replace('_', '-')}: for {' and '.join(owners)}; {where}")
