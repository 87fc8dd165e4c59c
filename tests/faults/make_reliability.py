"""`make faults`: injects every fault, fuzzes, loads, and writes docs/reliability.md with what happened.

python tests/faults/make_reliability.py            the whole set: about 15 minutes on two free cores
python tests/faults/make_reliability.py kills …    these parts again; of the others what was measured last
python tests/faults/make_reliability.py rest       the parts that failed, or that were not reached
"""

import functools
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import consistency
import fuzz
import load
import scenarios
import torch

ROOT = Path(__file__).parents[2]
PAGE, MEASURED = ROOT / "docs" / "reliability.md", Path(__file__).with_name("measured.json")
FUZZ_PIECE, DRAWS_PIECE = 3_000, 100  # what takes longest is done in parts of a seed each
FUZZ_CASES, FORGED_CASES = 18_000, 12_000  # of all kinds, and more of those behind a checksum
DRAWS, DRAWS_ON_RANKS = 2_000, 50  # configurations that must agree with themselves


def in_own_folder(work: Callable[[Path], Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return asdict(work(Path(folder)))


def fuzzed(seed: int, cases: int, only: str) -> Any:
    counts, findings = fuzz.fuzz(cases, seed, only)
    assert not findings, "\n".join(findings)
    return counts


def agree(check: Callable[[int, int], list[str]], draws: int, seed: int) -> int:
    findings = check(draws, seed)
    assert not findings, "\n".join(findings)
    return draws


def parts() -> dict[str, Callable[[], Any]]:
    """All that is measured, by name; those with most waiting come first."""
    bound = functools.partial
    found: dict[str, Callable[[], Any]] = {}
    for name, (scenario, _, times) in scenarios.SCENARIOS.items():
        found[name] = bound(in_own_folder, bound(scenario, times=times))
    found["ranks"] = bound(agree, consistency.ranks, DRAWS_ON_RANKS, 0)
    found |= {f"load {one.__name__}": bound(in_own_folder, one) for one in load.LOADS}
    for seed in range(FUZZ_CASES // FUZZ_PIECE):
        found[f"fuzz {seed}"] = bound(fuzzed, seed, FUZZ_PIECE, "")
    for seed in range(FORGED_CASES // FUZZ_PIECE):
        found[f"fuzz forged {seed}"] = bound(fuzzed, 100 + seed, FUZZ_PIECE, "forged")
    for seed in range(DRAWS // DRAWS_PIECE):
        found[f"draws {seed}"] = bound(agree, consistency.consistency, DRAWS_PIECE, seed + 1)
    return found


def measure(name: str) -> dict[str, Any]:
    """The findings of a part, the day, and the seconds of processor time that it took with its processes."""
    torch.set_num_threads(1)
    began = sum(os.times()[:4])
    found = parts()[name]()
    return {"on": f"{date.today()}", "seconds": sum(os.times()[:4]) - began, "found": found}


def main(names: list[str]) -> int:
    """Measures the parts of these names, or all, two at a time; writes the page once all are there."""
    measured = json.loads(MEASURED.read_text()) if names and MEASURED.exists() else {}
    rest = [name for name in parts() if name not in measured]
    asked = rest if names in ([], ["rest"]) else names
    measured = {name: part for name, part in measured.items() if name in parts() and name not in asked}
    with ProcessPoolExecutor(2) as pool:
        for name, future in [(name, pool.submit(measure, name)) for name in asked]:
            try:
                measured[name] = future.result()
                found = measured[name]["found"]
                shown = f"{sum(found.values()):,} cases" if isinstance(found, Counter) else found
                print(f"{measured[name]['seconds']:6.0f} s  {name}: {shown}", flush=True)
            except Exception as error:
                print(f"FAILED  {name}: {error}", flush=True)
            MEASURED.write_text(json.dumps(measured, indent=1))
    if missing := [name for name in parts() if name not in measured]:
        print(f"not written, for want of {', '.join(missing)}")
        return 1
    PAGE.write_text(page(measured))
    print(f"written: {PAGE}")
    return 0


def page(measured: dict[str, dict[str, Any]]) -> str:
    """The page: reliability.md beside this file, with what was measured."""
    found = {name: part["found"] for name, part in measured.items()}
    counts = sum((Counter(own) for name, own in found.items() if name.startswith("fuzz")), Counter())
    kinds = sorted({name.partition(":")[0] for name in counts})
    return (
        Path(__file__)
        .with_name("reliability.md")
        .read_text()
        .format(
            days=days_of(measured),
            faults=rows(found[name].values() for name in scenarios.SCENARIOS),
            damaged=rows(
                (kind, f"{counts[f'{kind}: accepted']:,}", f"{counts[f'{kind}: refused']:,}")
                for kind in kinds
            ),
            cases=counts.total(),
            forged=sum(count for name, count in counts.items() if name.startswith("forged")),
            draws=sum(own for name, own in found.items() if name.startswith("draws")),
            on_ranks=found["ranks"],
            load=rows(own.values() for name, own in found.items() if name.startswith("load")),
        )
    )


def rows(cells: Iterable[Iterable[object]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in cells)


def days_of(measured: dict[str, dict[str, Any]]) -> str:
    """The day of the last measurement, and the parts that are older."""
    by_day: dict[str, list[str]] = {}
    for name, part in measured.items():
        by_day.setdefault(part["on"], []).append(re.sub(r" \d+$|(?<=^load).*", "", name))
    newest, *older = sorted(by_day, reverse=True)
    return newest + "".join(f"; on {day}: {', '.join(dict.fromkeys(by_day[day]))}" for day in older)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
