"""A self-contained HTML page: prose, tables and inline figures, for light and dark, wide and narrow."""

import html
import re
from collections.abc import Iterable, Sequence

from deeploop.terminal import printable

HERE = "here"
"""First cell of a row with numbers of ours, which stand out beside the paper's."""
MISSING = "–"
"""A cell without a run behind it."""

STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1e; --mute: #6e6e73; --line: #d8d8dc; --paper: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8ea; --mute: #9a9aa0; --line: #3a3a3e; --paper: #17171a; }
}
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
h3 { font-size: 1rem; font-weight: 600; margin: 1.6rem 0 .4rem; } p { max-width: 60rem; }
figure { margin: 1rem 0; color: var(--mute); } figure svg { width: 100%; height: auto; }
figcaption, .note { color: var(--mute); font-size: .9rem; }
.scroll { overflow-x: auto; } .scroll[tabindex] { overflow-y: auto; max-height: 42rem; }
thead th { position: sticky; top: 0; background: var(--paper); }
@media print { .scroll[tabindex] { max-height: none; } }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin: 1rem 0 2rem; font-size: .9rem; }
a { color: inherit; text-underline-offset: .2em; }
tbody tr:hover { background: color-mix(in srgb, var(--ink) 6%, transparent); }
tr.ours td { font-weight: 600; } td.absent { color: var(--mute); }
td.long { white-space: normal; overflow-wrap: anywhere; min-width: 18rem; text-align: left; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap;
        font-size: .9rem; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; }
th { color: var(--mute); font-weight: 500; } th:first-child, td:first-child, .words { text-align: left; }
code, pre { font: .9em ui-monospace, monospace; } pre { overflow-x: auto; }
"""

# Nothing is fetched and no script runs, whatever a quoted name might say.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(title: str, parts: Iterable[str], style: str = "") -> str:
    """A whole page around parts made by the functions below; `style` is more CSS."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}{style}</style></head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def heading(text: str) -> str:
    return f'<h2 id="{anchor(text)}">{html.escape(text)}</h2>'


def anchor(text: str) -> str:
    """A heading's name for links: letters, digits and hyphens only."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "section"


def contents(titles: Iterable[str]) -> str:
    """Links to the headings."""
    links = (f'<a href="#{anchor(title)}">{html.escape(title)}</a>' for title in titles)
    return f"<nav>{' '.join(links)}</nav>"


def subheading(text: str) -> str:
    return f"<h3>{html.escape(text)}</h3>"


def note(text: str) -> str:
    return f'<p class="note">{html.escape(text)}</p>'


def paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def command(text: str) -> str:
    return f"<pre><code>{html.escape(text)}</code></pre>"


def figure(svg: str, caption: str) -> str:
    """`svg` is markup of our own making; everything else is escaped."""
    return f'<figure><div class="scroll">{svg}</div><figcaption>{html.escape(caption)}</figcaption></figure>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, name: str = "") -> str:
    """A table that scrolls by itself when the window is narrow; `name` is its id."""
    kinds = column_kinds(header, rows)
    head = "".join(
        f'<th scope="col"{kind}>{html.escape(cell)}</th>' for cell, kind in zip(header, kinds, strict=True)
    )
    body = "".join(f"<tr{_row_class(row)}>{''.join(map(_cell, row, kinds))}</tr>\n" for row in rows)
    identity = f' id="{html.escape(name)}"' if name else ""
    # A box that scrolls can be reached by the keyboard too.
    return (
        f'<div class="scroll" tabindex="0"><table{identity}><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


def _row_class(row: Sequence[str]) -> str:
    return ' class="ours"' if row and row[0] == HERE else ""


def _cell(text: str, kind: str) -> str:
    if text == MISSING:
        kind = ABSENT
    elif len(text) > LONG:
        kind = ' class="long"'
    return f"<td{kind}>{html.escape(text)}</td>"


def column_kinds(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The class of each column: words stand to the left, numbers and what is missing to the right."""
    return [
        "" if all(NUMBER.fullmatch(row[i]) for row in rows) else ' class="words"' for i in range(len(header))
    ]


ABSENT = ' class="absent"'
LONG = 80  # letters of a cell, a command, that is better wrapped than scrolled
# 2.8631, +0.0004, 5.90 ± 0.01 (1 of 3 collapsed, 3 runs of 2 seeds), 3 runs of 2 seeds, 3/5, 0.23 to 0.88,
# and the words in place of a number.
NUMBER = re.compile(
    r"(?:[-+]?\d[\d.,e+/* ±-]*(?: to [\d.]+)?(?:\(\d+ [^()]+\)|runs of \d+ seeds?)?|–||collapsed|unfinished)"
)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The same table in Markdown: numbers to the right, nothing in a cell read as markup."""

    def line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(map(markdown_text, cells))} |"

    rule = "|---|" + "---:|" * (len(header) - 1)
    return "\n".join([line(header), rule, *map(line, rows)])


def markdown_text(text: str) -> str:
    """Text that Markdown shows as it is."""
    escaped = html.escape(text, quote=False)
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", " ".join(escaped.split()))


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same table for a terminal: first column to the left, the others to the right."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()

    return "\n".join([line(header), "  ".join("─" * width for width in widths), *map(line, rows)])


def filled(text: str, begin: str, end: str, body: str) -> str:
    """A page with what stands between two markers made anew."""
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"lacks the markers {begin} and {end}")
    return f"{before}{begin}\n{body}\n{end}{after}"
