"""The report in a real browser: it renders, the console stays empty, its tables are the CSV files'."""

import csv
import re
from html.parser import HTMLParser

import pytest

from deeploop.commands.report import ReportArgs, run
from run_folders import write_run


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    root = tmp_path_factory.mktemp("browser")
    for block in ("prenorm", "deeploop"):
        for R in (1, 3):
            for seed in (0, 1):
                name = f"{block}-{R}-{seed} <script>document.title='broken'</script>".replace("/", "∕")
                loss = 2 + 0.1 * R + 0.01 * seed
                write_run(root / "runs" / name, rule=block, rounds=R, seed=seed, loss=loss)
    run(ReportArgs((root / "runs",), root / "out", title="a <report> & more"))
    return root / "out"


class Tables(HTMLParser):
    """Every table of a page by its id, as rows of cells; and the title."""

    def __init__(self):
        super().__init__()
        self.tables, self.title, self._into = {}, "", None

    def handle_starttag(self, tag, attributes):
        if tag == "table":
            self._rows = self.tables[dict(attributes)["id"]] = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")
            self._into = "cell"
        elif tag == "title":
            self._into = "title"

    def handle_endtag(self, tag):
        if tag in ("td", "th", "title"):
            self._into = None

    def handle_data(self, data):
        if self._into == "cell":
            self._rows[-1][-1] += data
        elif self._into == "title" and not self.title:
            self.title = data


def test_every_table_equals_its_csv(browse, report):
    dom, console = browse(report / "report.html", "--dump-dom")
    assert console == []
    page = Tables()
    page.feed(dom)
    assert page.title == "a <report> & more"  # no script of a run's name has run
    files = {path.stem: path for path in (report / "tables").glob("*.csv")}
    assert page.tables.keys() == files.keys()
    for name, path in files.items():
        with path.open(newline="", encoding="utf-8") as file:
            assert page.tables[name] == list(csv.reader(file)), name
    figures = len([*(report / "figures").glob("*.png")])
    assert [dom.count(f'<svg class="{kind}"') for kind in ("page", "phone")] == [figures, figures]
    assert figures > 0


def test_the_console_is_really_read(browse, tmp_path):
    (tmp_path / "bad.html").write_text("<script>console.error('something is wrong')</script>")
    _, console = browse(tmp_path / "bad.html", "--dump-dom")
    assert "something is wrong" in console[0]


@pytest.mark.parametrize("width", [1280, 390])
def test_it_draws_light_and_dark_wide_and_narrow(browse, report, tmp_path, width):
    """The paper of the page is white or nearly black; a phone's page is not wider than the phone."""
    image = pytest.importorskip("PIL.Image")
    corners = []
    for scheme in (0, 1):  # Blink's: dark, light
        picture = tmp_path / f"{scheme}.png"
        options = [f"--blink-settings=preferredColorScheme={scheme}", f"--window-size={width},1200"]
        _, console = browse(report / "report.html", *options, f"--screenshot={picture}")
        assert console == []
        with image.open(picture) as drawn:
            shades = drawn.convert("L")
            assert shades.size == (width, 1200)
            corners.append(shades.getpixel((2, 2)))
            low, high = shades.getextrema()
            assert high - low > 150  # there is ink
    dark, light = corners
    assert dark < 60 < 200 < light


def test_only_tables_and_figures_scroll(browse, report, tmp_path):
    """The page itself stays as wide as the window: its own script may ask, for this copy has no policy."""
    text = (report / "report.html").read_text(encoding="utf-8")
    text = re.sub(r"<meta http-equiv=[^>]*>", "", text)
    wide = "document.documentElement.scrollWidth > innerWidth"
    ask = f"<script>document.title = {wide} ? 'too wide' : 'fits'</script>"
    (tmp_path / "copy.html").write_text(text.replace("</body>", f"{ask}</body>"), encoding="utf-8")
    dom, _ = browse(tmp_path / "copy.html", "--window-size=390,800", "--dump-dom")
    assert "<title>fits</title>" in dom
