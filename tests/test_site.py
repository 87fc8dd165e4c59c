"""The documentation site: every link of every page leads somewhere, and every public name has a docstring."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def site():
    sys.path.insert(0, str(ROOT / "tools"))
    import site_pages

    yield site_pages
    sys.path.remove(str(ROOT / "tools"))


@pytest.fixture(scope="module")
def pages(site, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "pages"
    site.lay_out(folder)
    return folder


def test_every_link_leads_to_a_page_or_a_file(site, pages):
    broken = []
    for page in pages.rglob("*.md"):
        for part in site.FENCE.split(page.read_text(encoding="utf-8"))[::2]:
            links = [match[2] for match in site.LINK.finditer(part)]
            broken += [
                (str(page.relative_to(pages)), link) for link in links if not (page.parent / link).is_file()
            ]
    assert broken == []


def test_the_front_page_is_the_readme_and_lists_every_page(site, pages):
    front = (pages / "index.md").read_text(encoding="utf-8")
    assert "](docs/" not in front
    listed = {page for section in site.SECTIONS.values() for page in section}
    own = {page.stem for page in (ROOT / "docs").glob("*.md")}
    assert own <= listed, "pages of docs/ that no section of the site lists"
    assert "## deeploop train" in (pages / "commands.md").read_text(encoding="utf-8")


def test_a_public_name_without_a_docstring_is_named(site, monkeypatch):
    from deeploop import nn

    monkeypatch.setattr(nn.RMSNorm, "__doc__", None)
    with pytest.raises(ValueError, match=r"without a docstring: deeploop\.nn\.RMSNorm"):
        site.api_page()


def test_a_rate_does_not_break_after_its_e_minus(site):
    text = "at 4e-5, `--lr 1.7e-6`, [a](docs/2e-3.md)\n```sh\n--lr 3e-4\n```\n"
    shown = site.on_the_site("docs/data.md", text)
    assert shown == text.replace("4e-5", '<span class="rate">4e-5</span>', 1)
