"""Make the tables and figures of the pages, and assets/rules.json, from docs/results: `make results`.

    python -m research.pages              writes them
    python -m research.pages --check      exits with 1 where a page or file is out of step; draws nothing

A table is between two comments of its page, <!-- NAME: written by `make results` --> and <!-- end of NAME -->
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from matplotlib.figure import Figure

from deeploop.report.plots import save_png
from deeploop.report.recommend import FILE
from research import DOCS, RESULTS
from research.tables import (
    alignment,
    by_windows,
    escape_model,
    front,
    iterated,
    long_training,
    paper,
    quantization,
    reasoner_alignment,
    recommend,
    recurrent,
    rules,
)

Tables = Mapping[str, Callable[[Path], str]]
PAGES: dict[str, Tables] = {
    **paper.TABLES,
    **{
        f"results/{name}/README.md": tables
        for module in (
            rules,
            long_training,
            by_windows,
            iterated,
            recurrent,
            quantization,
            reasoner_alignment,
        )
        for name, tables in module.TABLES.items()
    },
}
"""Page → name of each table on it → what makes it of docs/results."""
FILES: dict[Path, Callable[[Path], str]] = {
    FILE: recommend.rules_json,
    RESULTS / "alignment" / "tables.md": alignment.tables_md,
    RESULTS / "alignment" / "gamma.json": alignment.gamma_json,
}
FIGURES: dict[str, Callable[[Path], Figure]] = {
    "figures/front.png": front.front_figure,
    "results/transfer/rates-a.png": rules.rates_figure,
    "results/alignment/gamma.png": alignment.gamma_figure,
    "results/alignment/training.png": alignment.training_figure,
    "results/alignment/start.png": alignment.start_figure,
    "results/escape-model/model.png": escape_model.model_figure,
}


def filled(text: str, begin: str, end: str, body: str) -> str:
    """The text of a page with another body between two markers."""
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"lacks the markers {begin} and {end}")
    return f"{before}{begin}\n{body}\n{end}{after}"


def renewed(text: str, tables: Tables, results: Path) -> str:
    """The text of a page with its tables made anew."""
    for name, make in tables.items():
        begin, end = f"<!-- {name}: written by `make results` -->", f"<!-- end of {name} -->"
        text = filled(text, begin, end, make(results))
    return text


def made() -> Iterator[tuple[Path, str]]:
    """Every file of text that is made, and what it has to hold."""
    yield from ((path, make(RESULTS)) for path, make in FILES.items())
    for page, tables in PAGES.items():
        yield DOCS / page, renewed((DOCS / page).read_text(encoding="utf-8"), tables, RESULTS)


def main() -> None:
    if "--check" in sys.argv[1:]:
        stale = [str(path) for path, text in made() if path.read_text(encoding="utf-8") != text]
        sys.exit(f"out of step with docs/results: {', '.join(stale)}; run: make results" if stale else 0)
    for path, text in made():
        path.write_text(text, encoding="utf-8")
    for name, draw in FIGURES.items():
        save_png(draw(RESULTS), DOCS / name)


if __name__ == "__main__":
    main()
