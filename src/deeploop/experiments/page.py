"""A self-contained HTML page: prose, tables and inline figures, for light and dark, wide and narrow."""

import html
from collections.abc import Iterable, Sequence

STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1e; --mute: #6e6e73; --line: #d8d8dc; --paper: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8ea; --mute: #9a9aa0; --line: #3a3a3e; --paper: #17171a; }
}
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
figure { margin: 1rem 0; color: var(--mute); } figure svg { width: 100%; min-width: 36rem; height: auto; }
figcaption, .note { color: var(--mute); font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: .35rem .8rem; border-bottom: 1px solid var(--line); text-align: right; }
th { color: var(--mute); font-weight: 500; } th:first-child, td:first-child { text-align: left; }
code, pre { font: .9em ui-monospace, monospace; } pre { overflow-x: auto; }
"""


def page(title: str, parts: Iterable[str]) -> str:
    """A whole page around parts made by the functions below."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style></head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def heading(text: str) -> str:
    return f"<h2>{html.escape(text)}</h2>"


def paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def command(text: str) -> str:
    return f"<pre><code>{html.escape(text)}</code></pre>"


def figure(svg: str, caption: str) -> str:
    """`svg` is markup of our own making; everything else is escaped."""
    return f'<figure><div class="scroll">{svg}</div><figcaption>{html.escape(caption)}</figcaption></figure>'


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls by itself when the window is narrow."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same table for a terminal: first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()

    return "\n".join([line(header), "  ".join("─" * width for width in widths), *map(line, rows)])
