"""Builds the documentation site from docs/, README, `--help` and docstrings, offline (`make docs`).

    python tools/site_pages.py [--out build/site]

Pages are laid out in a folder of their own, with links as the site has them, and Sphinx turns it into HTML.
README is the front page, a link to a folder leads to its README, and a file outside of docs/ that a page
links to becomes a page under files/. A broken link and a public name without a docstring are errors.
"""

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from api_page import api_page
from deeploop.cli import COMMANDS, USAGE, main

ROOT = Path(__file__).resolve().parent.parent
GUIDES = "training model data puzzles rules recurrent retrofit chat serving evaluation"
SECTIONS = {
    "Guides": [*GUIDES.split(), "reasoners", "iterate", "sweeps", "report", "scaling-out", "custom-task"],
    "Reference": ["commands", "api", "run-folder", "metrics", "architecture", "upgrading"],
    "Evidence": ["paper", "depth", "alignment", "escape", "performance", "reliability", "testing", "log"],
    "Results": ["results/README"],
}
MADE = ("commands", "api", "results/README")  # pages that no file in docs/ holds
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
# A rate such as 4e-5, but not in code or as the target of a link.
RATE = re.compile(r"(`[^`]*`|\]\([^)]*\))|(\b\d[\d.]*e-\d+)")
FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)
CONF = """\
project = "DeepLoop"
html_title = "DeepLoop"
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
pygments_dark_style = "github-dark"
extensions = ["myst_parser"]
myst_heading_anchors = 4
myst_enable_extensions = ["tasklist"]
suppress_warnings = ["myst.header", "toc.not_included", "misc.highlighting_failure"]
smartquotes = False
html_show_sourcelink = False
html_copy_source = False
html_show_copyright = False
"""
# A block of code has 98 letters beside each other, and lines break before a word of code, not inside it. On a
# phone, tables scroll before a column gets too narrow.
STYLE = """\
.highlight pre { font-size: .75rem; }
code.literal .pre, .rate, td.text-right { white-space: nowrap; }
@media (max-width: 40em) { td:first-child:not(.text-right) { min-width: 6.5em; } }
"""


# ── Pages ───────────────────────────────────────────────────────────────────────────────────────────────
def lay_out(folder: Path) -> None:
    """Writes every page and what they show, with Sphinx's settings, into an empty folder."""
    shutil.copytree(ROOT / "docs", folder)
    pages = {"README.md": read("README.md"), "docs/commands.md": commands_page(), "docs/api.md": api_page()}
    pages["docs/results/README.md"] = results_page()
    pages |= {f"docs/{path.relative_to(folder)}": path.read_text("utf-8") for path in folder.rglob("*.md")}
    waiting = [*pages]
    for source in waiting:  # grows on the way
        for target in sorted(outside(source, pages[source]) - set(pages)):
            pages[target] = read(target)
            waiting.append(target)
    for source, text in pages.items():
        text = on_the_site(source, text) + (contents(folder) if source == "README.md" else "")
        path = folder / page_of(source)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (folder / "conf.py").write_text(CONF, encoding="utf-8")
    (folder / "_static").mkdir()
    (folder / "_static" / "site.css").write_text(STYLE, encoding="utf-8")


def read(path: str) -> str:
    """A file of the repository as the text of a page."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    kind = {".py": "python", ".toml": "toml"}.get(Path(path).suffix, "text")
    return f"# {path}\n\n```{kind}\n{text}\n```\n"


def page_of(source: str) -> str:
    """The site's page for a file of the repository."""
    if source == "README.md":
        return "index.md"
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    return f"files/{source}" if source.endswith(".md") else f"files/{source}.md"


def linked(source: str, link: str) -> str | None:
    """The file of the repository that a link of another leads to; None where it leads nowhere in it."""
    path = normpath(join(dirname(source), link))
    if (ROOT / path).is_dir():
        path = join(path, "README.md")
    made = [f"docs/{name}.md" for name in MADE]
    return path if path in made or (ROOT / path).is_file() else None


def on_the_site(source: str, text: str) -> str:
    """A page's text with its links as the site has them."""

    def link(match: re.Match[str]) -> str:
        target = linked(source, match[2])
        if target is None:
            return match[0]  # Sphinx says that it is broken
        return f"{match[1]}{relpath(page_of(target), dirname(page_of(source)) or '.')}{match[3]}"

    def unbroken(match: re.Match[str]) -> str:
        return match[1] or f'<span class="rate">{match[2]}</span>'

    return in_prose(text, lambda part: RATE.sub(unbroken, LINK.sub(link, part)))


def outside(source: str, text: str) -> set[str]:
    """Files outside of docs/ that a text links to."""
    found: set[str] = set()

    def note(match: re.Match[str]) -> str:
        target = linked(source, match[2])
        if target is not None and not target.startswith("docs/"):
            found.add(target)
        return match[0]

    in_prose(text, lambda part: LINK.sub(note, part))
    return found


def in_prose(text: str, change: Callable[[str], str]) -> str:
    """The text, changed everywhere but in its code blocks."""
    return "".join(part if part.startswith("```") else change(part) for part in FENCE.split(text))


def contents(folder: Path) -> str:
    """The table of contents, which Sphinx shows beside every page."""
    text = ""
    for section, pages in SECTIONS.items():
        there = "\n".join(page for page in pages if page in MADE or (folder / f"{page}.md").exists())
        text += f"\n```{{toctree}}\n:hidden:\n:caption: {section}\n\n{there}\n```\n"
    return text


def results_page() -> str:
    """A list of docs/results, by the headings of its folders."""
    text = "# Results\nEvery number that these pages quote is recomputed from one of these folders.\n\n"
    for path in sorted((ROOT / "docs" / "results").glob("*/README.md")):
        title = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        title = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title)  # its links are relative to its own folder
        text += f"- [{path.parent.name}]({path.parent.name}/README.md): {title}\n"
    return text


def commands_page() -> str:
    """Make the page of --help texts."""
    text = "# Commands\nThis page is what `deeploop --help` and `deeploop COMMAND --help` print.\n\n"
    text += f"```text\n{USAGE}```\n"
    return text + "".join(f"\n## deeploop {name}\n```text\n{help_of(name)}```\n" for name in COMMANDS)


def help_of(command: str) -> str:
    said = io.StringIO()
    with redirect_stdout(said), suppress(SystemExit):
        main([command, "--help"])
    return re.sub(r"\x1b\[[0-9;]*m", "", said.getvalue()).rstrip() + "\n"


# ── The site ────────────────────────────────────────────────────────────────────────────────────────────
def build(out: Path) -> int:
    pages = out.with_name(f"{out.name}-pages")
    for folder in (pages, out):
        shutil.rmtree(folder, ignore_errors=True)
    os.environ["COLUMNS"] = "96"  # of --help: as wide as a block of code on the site
    lay_out(pages)
    words = [sys.executable, "-m", "sphinx", "-b", "html", "-q", "-W", "--keep-going", str(pages), str(out)]
    return subprocess.run(words, check=False).returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site")
    place = parser.parse_args().out
    code = build(place)
    sys.exit("the site has errors, above" if code else print(f"{place}/index.html"))
