"""The table, the picture and the page of `deeploop demo`, from what its runs recorded."""

from pathlib import Path
from typing import Any

from deeploop.report import page, plots

HEADER = ("block", "R", "N", "alpha", "beta", "loss", "floor - loss", "token sim.", "outcome")
OUTCOMES = {"escaped": "trains", "collapsed": "COLLAPSED", "undecided": "undecided"}

Key = tuple[str, int]  # the method, and its rounds
Results = dict[Key, dict[str, Any]]  # last validation, depth and, where the residual is scaled, alpha, beta


def write(out: Path, results: Results, folders: dict[Key, Path], *, rounds: int, seed: int) -> str:
    """Writes picture and page into `out`; returns what to print."""
    floor = next(iter(results.values()))["floor"]
    rows = [table_row(key, result) for key, result in results.items()]
    said = verdict(rounds, results)
    picture, html = out / "loss.png", out / "index.html"
    figure = draw(folders, floor)
    plots.save_png(figure, picture)
    html.write_text(make_page(rows, figure, floor, said, rounds=rounds, seed=seed), encoding="utf-8")
    return (
        f"\n{page.text_table(HEADER, rows)}\n\n{said}\n"
        f"Unigram floor: {floor:.3f} nats, the best that a model can do which ignores its input.\n\n"
        f"picture  {picture}\npage     {html}\nruns     {next(iter(folders.values())).parent}"
    )


def table_row(key: Key, result: dict[str, Any]) -> tuple[str, ...]:
    method, rounds = key
    scaled = "alpha" in result
    return (
        method,
        str(rounds),
        str(result["depth"]),
        f"{result['alpha']:.3f}" if scaled else "–",
        f"{result['beta']:.4f}" if scaled else "–",
        f"{result['loss']:.3f}",
        f"{result['floor'] - result['loss']:+.3f}",
        f"{result['similarity']:.2f}",
        OUTCOMES[result["verdict"]],
    )


def verdict(rounds: int, results: Results) -> str:
    """One sentence on the two exponents at the looped depth: whatever it is that happened."""
    small, large = (results[method, rounds]["verdict"] for method in ("DeepNorm p=1/4", "DeepLoop p=1/2"))
    start = f"At R = {rounds}"
    match small, large:
        case "collapsed", "escaped":
            return (
                f"{start} the exponent decides: p = 1/4 ends with all positions in one state, p = 1/2 trains."
            )
        case "escaped", "escaped":
            return f"{start} both exponents train with this seed; the ramp spared p = 1/4 too."
        case "collapsed", "collapsed":
            return f"{start} both exponents collapse with this seed; a slower ramp is what to try."
        case "escaped", "collapsed":
            return (
                f"{start} p = 1/4 trains and p = 1/2 collapses with this seed: not what the bound predicts."
            )
    return f"{start} with this seed: p = 1/4 {OUTCOMES[small]}; p = 1/2 {OUTCOMES[large]}."


def draw(folders: dict[Key, Path], floor: float) -> plots.Figure:
    methods, depths = (list(dict.fromkeys(part)) for part in zip(*folders, strict=True))
    panels = [
        (
            f"R = {rounds}" + (" (no block is revisited)" if rounds == 1 else " (looped)"),
            [
                plots.Curve(method, folders[method, rounds], colour)
                for method, colour in zip(methods, plots.COLOURS, strict=False)
            ],
        )
        for rounds in depths
    ]
    return plots.loss_and_similarity(panels, floor)


def make_page(
    rows: list[tuple[str, ...]], figure: plots.Figure, floor: float, said: str, *, rounds: int, seed: int
) -> str:
    return page.page(
        "DeepLoop demo: what the exponent decides",
        [
            page.paragraph(
                f"Two stored blocks, applied once and {rounds} times. The same seed, data and "
                "schedule each time; only the residual equation changes. All numbers are from the runs "
                "beside this page."
            ),
            page.figure(
                plots.inline_svg(figure),
                "Training loss (running mean of 5 readings) and mean cosine between token states. The "
                f"dashed line is the unigram floor, {floor:.3f} nats: a model whose positions all carry "
                "one state (similarity 1) cannot go below it.",
            ),
            page.paragraph(said),
            page.table(HEADER, rows),
            page.heading("What you see"),
            page.paragraph(
                "A looped block's update is summed over its visits and read back by all of them. The "
                "sandwich block answers with alpha = (2N)^p on the skip and beta = (8N)^-p in the initial "
                "branch matrices: the larger p is, the less of an update reaches the stream. While the "
                "learning rate rises, every position can drift into one state, and then the loss stands at "
                "the floor. How often this happens depends on p, on the depth, on the seed and on how fast "
                "the rate rises; docs/results/demo counts it over seeds."
            ),
            page.heading("Again, with another seed"),
            page.command(f"deeploop demo --seed {seed + 1}"),
        ],
    )
