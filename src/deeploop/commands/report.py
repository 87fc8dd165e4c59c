"""`deeploop report`: tables and figures of runs, as one HTML page, Markdown and CSV."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from deeploop.terminal import printable


@dataclass(frozen=True)
class ReportArgs:
    """Compare runs: one HTML page, Markdown, and a CSV file for each table."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run folders, sweep folders, or folders of them."""
    out: Path = Path("report")
    """Folder of report.html, report.md, tables/ and figures/."""
    title: str = "deeploop: runs"
    """Title of the page."""
    paper: bool = False
    """Compare with the paper's tables, also runs that are not of its kind."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("runs: name at least one run folder or sweep")


def run(args: ReportArgs) -> str:
    """Write the report; return its location."""
    # Now: these wait for Matplotlib, --help does not.
    from deeploop.report.document import count_of, count_states, damage, make_sections
    from deeploop.report.groups import Histories
    from deeploop.report.page import check_out, write
    from deeploop.report.runs import find_runs

    check_out(args.out)
    runs = find_runs(args.runs)
    histories = Histories()
    sections = make_sections(runs, histories, paper=args.paper)
    write(args.out, args.title, sections)
    for line in damage(runs, histories):
        print(printable(line), file=sys.stderr)
    states = ", ".join(f"{count} {state}" for state, count in count_states(runs).items())
    return f"{count_of(runs)} ({states})\nwritten: {args.out / 'report.html'}, report.md, tables/, figures/"
