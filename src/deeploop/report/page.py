"""Pages: sections of prose, tables and charts, as HTML, Markdown and CSV. No torch.

A page is one file, without scripts, for light and dark, wide and narrow.
"""

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deeploop.files import own_folder, write_text
from deeploop.report import plots
from deeploop.report.plots import Chart
from deeploop.report.tables import Table, markdown_text

STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1e; --mute: #6e6e73; --line: #d8d8dc; --paper: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8ea; --mute: #9a9aa0; --line: #3a3a3e; --paper: #17171a; }
}
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 76rem; margin: 2rem auto; padding: 0 1rem; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
h3 { font-size: 1rem; font-weight: 600; margin: 1.6rem 0 .4rem; } p { max-width: 60rem; }
figure { margin: 1rem 0; color: var(--mute); } figure svg { display: block; width: 100%; height: auto; }
.phone { display: none !important; }
figcaption, .note { color: var(--mute); font-size: .9rem; }
.scroll { overflow-x: auto; } .tall { overflow-y: auto; max-height: 42rem; }
thead th { position: sticky; top: 0; background: var(--paper); vertical-align: bottom; }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin: 1rem 0 2rem; font-size: .9rem; }
a { color: inherit; text-underline-offset: .2em; }
tbody tr:hover { background: color-mix(in srgb, var(--ink) 6%, transparent); }
tr.ours td { font-weight: 600; } td.absent { color: var(--mute); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right; }
th { color: var(--mute); font-weight: 500; } td { white-space: nowrap; }
th:first-child, td:first-child, .words { text-align: left; }
.wide { font-size: .8rem; } .wide .words { white-space: normal; }
.wide th, .wide td { padding: .25rem .4rem; }
td.long { white-space: normal; overflow-wrap: anywhere; min-width: 9rem; text-align: left; }
code, pre { font: .9em ui-monospace, monospace; } pre { overflow-x: auto; }
@media (max-width: 40rem) {
  .page { display: none !important; } .phone { display: block !important; }
  .cards thead { display: none; } .cards, .cards tbody { display: block; }
  .cards tr { display: block; padding: .4rem 0; border-bottom: 1px solid var(--line); }
  .cards td, .cards td.long { display: inline-block; padding: 0 .9rem 0 0; border: 0; min-width: 0;
                              white-space: normal; }
  .cards td:not(:first-child)::before { content: attr(data-head) " "; color: var(--mute); }
  .cards td:first-child { display: block; font-weight: 600; } .cards td.absent { display: none; }
}
"""
# Nothing is fetched and no script runs, whatever a quoted name might say.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
OWN = {"report.html", "report.md", "tables", "figures"}


@dataclass(frozen=True)
class Html:
    """Markup that we generated; everything else is escaped."""

    text: str


Part = str | Table | Chart | Html
"""A paragraph, a table, a chart or markup."""


@dataclass(frozen=True)
class Section:
    """A heading and the parts below it; without a title, no heading."""

    title: str
    parts: Sequence[Part]


def command(text: str) -> Html:
    return Html(f"<pre><code>{html.escape(text)}</code></pre>")


def note(text: str) -> Html:
    return Html(f'<p class="note">{html.escape(text)}</p>')


# ── HTML ────────────────────────────────────────────────────────────────────────────────────────────────
def page(title: str, sections: Sequence[Section], *, style: str = "", contents: bool = False) -> str:
    """Make a whole page; `style` is additional CSS, `contents` adds links to the headings."""
    name = html.escape(title)
    titles = [section.title for section in sections if section.title]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f"<title>{name}</title>\n<style>{STYLE}{style}</style></head>\n<body>\n<h1>{name}</h1>\n"
        + (links(titles) if contents else "")
        + "\n".join(_section(section) for section in sections)
        + "\n</body></html>\n"
    )


def links(titles: Iterable[str]) -> str:
    """Make links to headings."""
    words = (f'<a href="#{anchor(title)}">{html.escape(title)}</a>' for title in titles)
    return f"<nav>{' '.join(words)}</nav>\n"


def anchor(text: str) -> str:
    """Return a heading's anchor: letters, digits and hyphens only."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "section"


def _section(section: Section) -> str:
    title = f'<h2 id="{anchor(section.title)}">{html.escape(section.title)}</h2>\n' if section.title else ""
    return title + "\n".join(map(_part, section.parts))


def _part(part: Part) -> str:
    if isinstance(part, Html):
        return part.text
    if isinstance(part, str):
        return f"<p>{html.escape(part)}</p>"
    if isinstance(part, Chart):
        caption = html.escape(part.caption)
        return f"<figure>{plots.inline_svg(part)}<figcaption>{caption}</figcaption></figure>"
    title = f"<h3>{html.escape(part.title)}</h3>" if part.title else ""
    return title + part.html() + (note(part.note).text if part.note else "")


# ── Markdown, and the files of a report ─────────────────────────────────────────────────────────────────
def markdown(title: str, sections: Sequence[Section]) -> str:
    parts = [f"# {markdown_text(title)}"]
    for section in sections:
        parts.append(f"## {section.title}")
        parts += [_markdown_part(part) for part in section.parts if not isinstance(part, Html)]
    return "\n\n".join(parts) + "\n"


def _markdown_part(part: str | Table | Chart) -> str:
    if isinstance(part, str):
        return markdown_text(part)
    if isinstance(part, Chart):
        return f"![{markdown_text(part.caption)}](figures/{part.name}.png)"
    title = f"**{markdown_text(part.title)}** ([CSV](tables/{part.name}.csv))"
    return "\n\n".join([title, part.markdown(), *([markdown_text(part.note)] if part.note else [])])


def check_out(out: Path) -> None:
    """Raise ValueError for a folder that holds anything but a report."""
    held = {one.name for one in out.iterdir()} if out.is_dir() else set()
    if not held <= OWN and "report.html" not in held:
        raise ValueError(f"out={out}: holds other things than a report; name a new folder")


def write(out: Path, title: str, sections: Sequence[Section]) -> None:
    """Write report.html, report.md, tables/*.csv and figures/*.png into `out`."""
    old = [*out.glob("tables/*.csv"), *out.glob("figures/*.png")] if (out / "report.html").exists() else []
    for path in old:  # a table of an earlier report must not pass for one of this
        path.unlink()
    for name in ("tables", "figures"):
        own_folder(out / name)
    for part in (part for section in sections for part in section.parts):
        if isinstance(part, Table):
            write_text(out / "tables" / f"{part.name}.csv", part.csv())
        elif isinstance(part, Chart):
            plots.save_png(part, out / "figures" / f"{part.name}.png")
    write_text(out / "report.md", markdown(title, sections))
    write_text(out / "report.html", page(title, sections, contents=True))
