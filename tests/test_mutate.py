"""The mutation tester: each change is another program, and a draw is the same for the same seed."""

import importlib.util
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = b'''"""A docstring with a + b."""
LIMIT: int | None = 3


def area(width, height, scale=1.0):
    if width < 0 or not height:
        raise ValueError(f"width={width + 1}: must be at least 0")
    print("said")
    log.append(width)
    total = sum([width * height], start=0)
    return -total if scale is None else max(total, scale)
'''


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("mutate", ROOT / "tools" / "mutate.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutate"] = module  # where a dataclass looks itself up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["mutate"]


def test_what_is_changed_and_what_is_not(tool):
    found = {(one.line, one.new) for one in tool.mutants("nn/area.py", SOURCE)}
    assert found == {
        (2, "4"),
        (5, "2.0"),
        (6, "(not (width < 0 or not height))"),
        (6, "(width < 0 and (not height))"),
        (6, "(width <= 0)"),
        (6, "1"),
        (6, "height"),
        (9, "pass"),
        (10, "(max([width * height], start=0))"),
        (10, "(sum([width * height]))"),
        (10, "(width / height)"),
        (10, "1"),
        (11, "return None"),
        (11, "(-total if not scale is None else max(total, scale))"),
        (11, "(scale is not None)"),
        (11, "total"),
        (11, "(min(total, scale))"),
    }
    inside = {one.function for one in tool.mutants("nn/area.py", SOURCE) if one.line > 5}
    assert inside == {5}


def test_a_mutant_differs_in_its_own_place_alone(tool):
    for one in tool.mutants("nn/area.py", SOURCE):
        assert tool.differs(one, SOURCE), one
        old, new = SOURCE.splitlines(), one.apply(SOURCE).splitlines()
        assert [i for i, (a, b) in enumerate(zip(old, new, strict=True), 1) if a != b] == [one.line]
    same = tool.Mutant("nn/area.py", 2, 0, 0, 0, "# a comment\n")
    assert not tool.differs(same, SOURCE)


def test_a_draw_is_even_and_repeatable(tool):
    source = ROOT / "src" / "deeploop"
    chosen = tool.sample(source, ["theory", "eval"], 9, seed=3)
    assert Counter(one.package for one in chosen) == {"theory": 5, "eval": 4}
    assert len({(one.path, one.line) for one in chosen}) == 9
    assert tool.sample(source, ["theory", "eval"], 9, seed=3) == chosen
    assert tool.sample(source, ["theory", "eval"], 9, seed=4) != chosen
    assert not any(one.path.startswith(tool.SKIPPED) for one in tool.sample(source, ["nn"], 60, seed=0))


def test_a_record_is_summed_up_by_package(tool):
    first, second, third, fourth = tool.sample(ROOT / "src" / "deeploop", ["nn", "theory"], 4, seed=0)
    record = {"seed": 0, "mutants": {}}

    def note(one, outcome):
        tool.note(record, one, (ROOT / "src" / "deeploop" / one.path).read_bytes(), outcome)

    for one, outcome in ((first, "survived"), (second, "survived"), (third, "timeout"), (fourth, "killed")):
        note(one, outcome)
    assert record["mutants"][first.key]["diff"] != []
    record["mutants"][second.key]["harmless"] = "a message"
    note(first, "killed")
    note(second, "survived")
    assert tool.table(record).splitlines()[2:] == [
        "| theory | 2 | 2 (100 %) | 2 (100 %) | 0 | 0 |",
        "| nn | 2 | 0 (0 %) | 1 (50 %) | 1 | 1 |",
        "| all | 4 | 2 (50 %) | 3 (75 %) | 1 | 1 |",
    ]
    assert tool.survivors(record).splitlines()[0] == f"{second.path}:{second.line}"
    assert tool.survivors(record).splitlines()[-1] == "  a message"
