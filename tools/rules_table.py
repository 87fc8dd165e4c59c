"""Makes from docs/results (`make results`): assets/rules.json, and the tables and figures of docs/rules.md.

`deeploop recommend` answers from that file: the best peak rate of every rule at every R that was run.
`--check` says whether the file and the tables are in step.
"""

import json
import sys
from pathlib import Path

from deeploop.report import transfer_views as views
from deeploop.report.evidence import FILE, evidence_of, to_json
from deeploop.report.groups import Histories
from deeploop.report.page import filled, markdown_table, markdown_text
from deeploop.report.plots import save_png
from deeploop.report.runs import find_runs
from deeploop.report.transfer import Study, find_studies

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
FOLDERS = ("transfer", "shapes")  # those under docs/results whose runs vary in rule, R and peak rate
BEGIN, END = "<!-- rates: written by `make results` -->", "<!-- end of rates -->"
LOSSES = (
    "<!-- losses: written by `make results` -->",
    "<!-- end of losses -->",
)  # in the README of the results


def collect(results: Path) -> list[tuple[str, Study]]:
    """Folder and study, of the folders that are there."""
    found = []
    for name in FOLDERS:
        if (results / name).is_dir():
            found += [(name, study) for study in find_studies(find_runs([results / name]), Histories())]
    return found


def rules_json(studies: list[tuple[str, Study]]) -> str:
    evidence = [evidence_of(study, f"docs/results/{name}") for name, study in studies]
    return json.dumps(to_json(evidence), indent=1, ensure_ascii=False) + "\n"


def figure_name(name: str, study: Study) -> str:
    return f"results/{name}/rates-{study.letter.lower()}.png"


def tables(studies: list[tuple[str, Study]]) -> str:
    """Markdown: for each study that spans R its table and its figure."""
    parts = []
    for name, study in studies:
        if not study.over_rounds:
            continue
        first = views.rules_table(study, name)
        caption = markdown_text(views.caption(study))
        parts += [f"[results/{name}](results/{name}). {markdown_text(first.title)}"]
        parts += [markdown_table(first.header, first.rows), markdown_text(first.note)]
        alt = "Validation loss against peak learning rate, by rule and R"
        parts += [f"![{alt}]({figure_name(name, study)})", f"*What to see: {caption}*"]
    return "\n\n".join(parts) or "No runs are here yet."


def losses(studies: list[tuple[str, Study]]) -> dict[Path, str]:
    """The README of each study that spans R, with the losses at every rate."""
    made = {}
    for name, study in studies:
        if study.over_rounds:
            table, page = views.losses_table(study, name), DOCS / "results" / name / "README.md"
            body = f"{markdown_table(table.header, table.rows)}\n\n{markdown_text(table.note)}"
            made[page] = filled(page.read_text(encoding="utf-8"), *LOSSES, body)
    return made


if __name__ == "__main__":
    studies = collect(DOCS / "results")
    page = DOCS / "rules.md"
    old = page.read_text(encoding="utf-8")
    made = {FILE: rules_json(studies), page: filled(old, BEGIN, END, tables(studies)), **losses(studies)}
    if "--check" in sys.argv[1:]:
        stale = [path.name for path, text in made.items() if path.read_text(encoding="utf-8") != text]
        sys.exit(f"{', '.join(stale)}: out of step with docs/results; run: make results" if stale else 0)
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")
    for name, study in studies:
        if study.over_rounds:
            save_png(views.transfer_figure(study), DOCS / figure_name(name, study))
