"""A table: rows of text under headings with units, as text, Markdown, CSV and HTML. No torch."""

import csv
import html
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deeploop.terminal import printable

MISSING = "–"
"""A cell without a run behind it."""
HERE = "here"
"""First cell of a row with our numbers, which stand out beside the paper's."""
PHONE = 44
"""Letters of a row on a phone. A wider table shows each row as a card there."""
PAGE = 110
"""Letters of a row on a page. A wider table has smaller letters there, and its words are wrapped."""
LONG = 24
"""Letters of a cell that may be wrapped."""
TALL = 40
"""Rows of a table that scrolls in a box of its own."""
# 2.8631, +0.0004, 5.90 ± 0.01 (1 of 3 collapsed, 3 runs of 2 seeds), 3/5, 0.23 to 0.88, and the words in
# place of a number.
NUMBER = re.compile(
    r"(?:[-+]?\d[\d.,e+/*% ±-]*(?: to [\d.]+)?(?:\([^()]+\)|runs of \d+ seeds?)?|–||collapsed|unfinished)"
)
# What begins a formula, also in full width; a signed number is none.
FORMULA = re.compile(r"[=@\t\r\n＝＠＋－]|[+-](?![\d.,]+(e[+-]?\d+)?[%*]?$)")


@dataclass(frozen=True)
class Table:
    """A table whose text, Markdown, CSV and HTML show the same cells."""

    name: str
    """File name of its CSV, and its id on a page."""
    title: str
    header: Sequence[str]
    """Headings, with units."""
    rows: Sequence[Sequence[str]]
    note: str = ""

    @classmethod
    def of(
        cls,
        name: str,
        title: str,
        items: Iterable[Any],
        columns: Mapping[str, Callable[[Any], str]],
        note: str = "",
    ) -> "Table":
        """Make a row of each item, from functions that return its cell under each heading."""
        rows = [[cell(item) for cell in columns.values()] for item in items]
        return cls(name, title, [*columns], rows, note)

    def without(self, headings: Iterable[str]) -> "Table":
        left_out = set(headings)
        keep = [index for index, heading in enumerate(self.header) if heading not in left_out]
        rows = [[row[index] for index in keep] for row in self.rows]
        return replace(self, header=[self.header[index] for index in keep], rows=rows)

    def column(self, heading: str) -> list[str]:
        index = self.header.index(heading)
        return [row[index] for row in self.rows]

    @property
    def filled(self) -> "Table":
        """Return the table without the columns in which every cell is missing."""
        return self.without(h for h in self.header if {*self.column(h)} <= {MISSING})

    @property
    def widths(self) -> list[int]:
        return [max(map(len, cells)) for cells in zip(self.header, *self.rows, strict=True)]

    @property
    def width(self) -> int:
        """Return the number of characters in a line of `text`."""
        return sum(self.widths) + 2 * (len(self.header) - 1)

    @property
    def numeric(self) -> list[bool]:
        """Return the columns of numbers, which are right-aligned."""
        return [all(NUMBER.fullmatch(row[i]) for row in self.rows) for i in range(len(self.header))]

    def text(self) -> str:
        """Format for a terminal: the first column left-aligned, the others right-aligned."""
        shown = replace(self, rows=[[printable(cell) for cell in row] for row in self.rows])

        def line(row: Sequence[str]) -> str:
            first, *rest = zip(row, shown.widths, strict=True)
            return "  ".join([first[0].ljust(first[1]), *(cell.rjust(w) for cell, w in rest)]).rstrip()

        rule = "  ".join("─" * width for width in shown.widths)
        return "\n".join([line(shown.header), rule, *map(line, shown.rows)])

    def markdown(self) -> str:
        """Format as Markdown, with numbers right-aligned and no markup in cells."""

        def line(cells: Iterable[str]) -> str:
            return f"| {' | '.join(map(markdown_text, cells))} |"

        rule = "|---|" + "---:|" * (len(self.header) - 1)
        return "\n".join([line(self.header), rule, *map(line, self.rows)])

    def csv(self) -> str:
        rows = io.StringIO(newline="")
        csv.writer(rows).writerows([inert(cell) for cell in row] for row in (self.header, *self.rows))
        return rows.getvalue()

    def html(self) -> str:
        """Format as HTML; on a phone, the rows of a table that is too wide become cards."""
        kinds = ["" if number else "words" for number in self.numeric]
        head = "".join(
            f'<th scope="col" class="{kind}">{html.escape(cell)}</th>'
            for cell, kind in zip(self.header, kinds, strict=True)
        )
        body = "\n".join(self._row(row, kinds) for row in self.rows)
        kind = " wide" * (self.width > PAGE)
        cards = f' class="cards{kind}"' if self.width > PHONE else ""
        # A box that scrolls can be reached by the keyboard too.
        tall = " tall" * (len(self.rows) > TALL)
        return (
            f'<div class="scroll{tall}" tabindex="0"><table id="{html.escape(self.name)}"{cards}>'
            f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
        )

    def _row(self, row: Sequence[str], kinds: Sequence[str]) -> str:
        def cell(heading: str, text: str, kind: str) -> str:
            kind = "absent" if text == MISSING else kind
            kind += " long" * (len(text) > LONG)
            return f'<td class="{kind}" data-head="{html.escape(heading)}">{html.escape(text)}</td>'

        ours = ' class="ours"' if row[0] == HERE else ""
        return f"<tr{ours}>{''.join(map(cell, self.header, row, kinds))}</tr>"


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for a terminal."""
    return Table("", "", header, rows).text()


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return Table("", "", header, list(rows)).markdown()


def inert(cell: str) -> str:
    """Return the cell, with an apostrophe if a spreadsheet would run it: names of runs are untrusted."""
    return f"'{cell}" if FORMULA.match(cell) else cell


def markdown_text(text: str) -> str:
    """Escape text so that Markdown shows it as it is."""
    escaped = html.escape(text, quote=False)
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", " ".join(escaped.split()))


def number(value: float | None, form: str) -> str:
    return MISSING if value is None else format(value, form)
