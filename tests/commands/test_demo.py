"""The demo end to end at a toy size: what it prints and draws is what its runs recorded."""

import json
import re
from pathlib import Path

import pytest

from deeploop.commands.demo import METHODS, DemoConfig, cell, run
from deeploop.report.demo import HEADER, verdict
from deeploop.train.metrics import read_metrics


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[DemoConfig, str]:
    config = DemoConfig(out=tmp_path_factory.mktemp("demo"), rounds=2, steps=8)
    return config, run(config)


def test_table_holds_the_last_validation_of_every_run(demo: tuple[DemoConfig, str]) -> None:
    config, printed = demo
    for method in METHODS:
        for rounds in (1, config.rounds):
            settings = cell(config, method, rounds)
            last = read_metrics(settings.out, "validation")[-1]
            assert last["step"] == config.steps
            row = next(line for line in printed.splitlines() if re.match(rf"{method}\s+{rounds}\s", line))
            assert f"{last['loss']:.3f}" in row
            assert f"{last['similarity']:.2f}" in row
            if settings.model.block == "sandwich":
                assert f"{(2 * 2 * rounds) ** settings.model.p:.3f}" in row  # α = (2N)^p, N = 2 blocks × R


def test_page_and_picture_are_there_and_stand_alone(demo: tuple[DemoConfig, str]) -> None:
    config, printed = demo
    text = (config.out / "index.html").read_text(encoding="utf-8")
    assert (config.out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert str(config.out / "index.html") in printed
    assert text.count("<svg") == 1
    assert all(column in text for column in HEADER)
    # Nothing is fetched: the only addresses are names of XML vocabularies.
    assert not re.search(r"(src|href)\s*=\s*[\"']https?:", text)
    assert "<script" not in text


def test_a_second_start_trains_nothing_again(demo: tuple[DemoConfig, str]) -> None:
    config, printed = demo
    settings = cell(config, "DeepLoop p=1/2", config.rounds)
    before = (settings.out / "metrics.jsonl").read_text()
    assert run(config) == printed
    assert (settings.out / "metrics.jsonl").read_text() == before


def test_all_six_share_seed_data_and_schedule() -> None:
    config = DemoConfig(out=Path("demo"))
    cells = [cell(config, method, rounds) for method in METHODS for rounds in (1, config.rounds)]
    assert len({repr((c.seed, c.data, c.optim, c.device)) for c in cells}) == 1
    assert len({c.out for c in cells}) == 6


@pytest.mark.parametrize(
    ("small", "large", "says"),
    [
        ("collapsed", "escaped", "the exponent decides"),
        ("escaped", "escaped", "both exponents train"),
        ("collapsed", "collapsed", "both exponents collapse"),
        ("escaped", "collapsed", "not what the bound predicts"),
        ("undecided", "escaped", "p = 1/4 undecided; p = 1/2 trains"),
        ("collapsed", "undecided", "p = 1/4 COLLAPSED; p = 1/2 undecided"),
    ],
)
def test_verdict_says_what_happened(small: str, large: str, says: str) -> None:
    config = DemoConfig()
    results = {
        ("DeepNorm p=1/4", config.rounds): {"verdict": small},
        ("DeepLoop p=1/2", config.rounds): {"verdict": large},
    }
    assert says in verdict(config.rounds, results)


def test_shipped_seed_counts_are_those_of_the_readme() -> None:
    path = Path(__file__).parents[2] / "docs" / "results" / "demo" / "seeds.json"
    rows = json.loads(path.read_text())
    readme = (path.parents[3] / "README.md").read_text()
    for method in METHODS:
        own = [row for row in rows if row["method"] == method]
        assert len(own) >= 3
        escaped = sum(row["validations"][-1]["verdict"] == "escaped" for row in own)
        assert f"{method}: {escaped} of {len(own)}" in readme
