"""`make faults`: injects every fault, fuzzes, loads, and writes docs/reliability.md with what happened.

python tests/faults/make_reliability.py            the whole set: about 15 minutes on two free cores
python tests/faults/make_reliability.py kills …    these parts again; of the others what was measured last
python tests/faults/make_reliability.py rest       the parts that failed, or that were not reached
"""

import functools
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
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
    measured = {name: value for name, value in measured.items() if name not in asked}
    with ProcessPoolExecutor(2) as pool:
        for name, future in [(name, pool.submit(measure, name)) for name in asked]:
            try:
                measured[name] = future.result()
                print(f"{measured[name]['seconds']:6.0f} s  {name}: {measured[name]['found']}", flush=True)
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
    done = {name: part["found"] for name, part in measured.items()}
    days = sorted({part["on"] for part in measured.values()})
    table = [scenarios.Row(**done[name]) for name in scenarios.SCENARIOS]
    loaded = [load.Load(**own) for name, own in done.items() if name.startswith("load")]
    counts = sum((Counter(own) for name, own in done.items() if name.startswith("fuzz")), Counter())
    draws = sum(own for name, own in done.items() if name.startswith("draws"))
    kinds = sorted({name.partition(":")[0] for name in counts})
    fuzzed = [
        f"| {kind} | {counts[f'{kind}: accepted']:,} | {counts[f'{kind}: refused']:,} |" for kind in kinds
    ]
    forged = sum(count for name, count in counts.items() if name.startswith("forged"))
    parts = [
        HEAD.format(days=" to ".join(dict.fromkeys((days[0], days[-1])))),
        "| fault | how it is injected | times | what happened | what was lost |\n|---|---|---:|---|---|",
        "\n".join(f"| {r.fault} | {r.injected} | {r.times} | {r.happened} | {r.lost} |" for r in table),
        WORLD,
        f"## Bad input\n{FUZZ}\n\n| what is damaged | accepted | refused |\n|---|---:|---:|",
        "\n".join(fuzzed),
        f"\n{sum(counts.values()):,} cases in all, {forged:,} of them forged; no other exception, "
        "and none took 10 s.\n",
        AGREED.format(draws=draws, on_ranks=done["ranks"]),
        "## Load\n| what | how much | measured |\n|---|---|---|",
        "\n".join(f"| {one.what} | {one.amount} | {one.measured} |" for one in loaded),
        OTHER,
        TAIL,
    ]
    return "\n".join(parts)


HEAD = """# Reliability
What happens to a run when something breaks: a kill, a full disk, a damaged file? This page is for
anyone who trusts long runs to `deeploop`, and for reviewers of its file readers.

**In short.** After every fault below, the same command or `--resume` ended exactly as an undisturbed
run of the same seed: the same losses, weights, moments and random generators, bit for bit. What was
lost is at most the work since the last checkpoint, which is repeated (with `optim.non_finite` skip, the
skipped batch). Damaged and forged files end in one line of error.

`make faults` injects every fault into real processes and writes this page: about 15 minutes on two free
cores. What is here was measured on {days}. `make test` includes a short version.

## Faults during training"""

WORLD = """
"nothing" means that after `--resume` the run ended with the same metrics and the same bytes in its last
checkpoint.

`tests/train/test_two_ranks.py` tests resuming with other ranks: one rank to two and back, plain to DDP
and FSDP2 and back, with the same losses within 1e-6. No window is read twice or left out for any number
of ranks. From a GPU to a CPU the files stay the same and the arithmetic changes.
"""

FUZZ = """Files that may come from a stranger, and command lines, are damaged at random: bits are flipped,
pieces are cut, doubled or replaced, and JSON values are exchanged. Each case is opened as the commands open
it, in the same process. It is either accepted (the damage did not matter, or gave another valid file)
or refused with an error that the command line prints in one line. Command lines, and texts given to
`prepare`, end with exit 0 or with one line and exit 2; both count as accepted here.

In *forged* cases the content was exchanged and the checksums were recomputed, so that the case reaches
the checks after them; it is then used as a resumed run, a loader or an evaluation uses it. No case may
take 10 s, or allocate more than ten times its largest file (at least 8 MiB) of address space, and in
every seventh case of what Python and numpy hold at once. The 8 MiB cover xz's window with the blocks
that are read (5 MiB) and a report's figures (3 MiB). The first case of a kind loads modules and has 1
GiB. An archive that asks for a larger window, as `xz -9` writes, is refused.
[SECURITY.md](../SECURITY.md) names the one reader of each file."""

AGREED = """## Any configuration
{draws:,} tiny models are drawn: rule, prelude, coda, injection, first state, gate, attention, rounds and how
they are sampled, gradients through some of them, batch, micro-batch, optimizer, one corpus or a mixture, with
or without a last phase, documents apart or not. Of each,
- a resume is the uninterrupted run bit for bit, and within 1e-4 with another micro-batch;
- with another batch and more steps no sequence comes twice, the last phase has its share of all steps,
  and the rounds go on rising as they did;
- `--init-from` starts at the loss of the run or of its export, and a field that would change it is refused
  from Python;
- `deeploop validate` says what training said, and the export in transformers gives the run's logits.

{on_ranks} more are trained on two ranks, replicated or sharded: from the start, from one rank's checkpoint
and back to one rank, each within 1e-4 of one rank; with another batch and more steps as above; and with
`--init-from`.
"""

OTHER = """
## Other conditions
- **A file system without locks** (`flock` fails, as on some NFS mounts): `train`, `sweep`, `prepare`
  and `export` refuse the folder in one line. Other commands write their results, each file whole
  (`tests/test_files.py`).
- **Power loss**: a file is synced before it gets its name, and its folder after that; a checkpoint
  likewise (`tests/test_files.py`, `tests/train/test_checkpoint.py`). Tested by the order of the calls.
- **A read-only folder**: commands that write there refuse in one line; `runs`, `data` and `generate`
  work (`tests/faults/test_unprivileged.py`).
- **`--init-from` that does not fit** (another width, number of blocks or kind of model, another function
  of the same shapes from Python, or no run): one line, and nothing is written
  (`tests/train/test_rundir.py`, `tests/train/test_puzzle_task.py`).
- **100,000,000 steps and more**: checkpoints are found and rotated by their number, whose name then has
  nine digits (`tests/train/test_checkpoint.py`).
- **A full GPU**: one line and exit code 75 in every command (`tests/test_cli.py`).
- **A formula as a run's name** is text in a report's CSV, behind an apostrophe
  (`tests/report/test_report.py`).
- **The oldest versions that pyproject.toml allows**, all but torch: tests of data, tokenizers,
  evaluation, export, resume and sweeps pass with them. Tried by hand; not part of `make faults`.
"""

TAIL = """
## Determinism
On a CPU the same seed gives the same losses, weights and moments bit for bit, with any number of
interruptions, if torch, the number of threads and the number of ranks stay the same. Another number of
ranks adds gradients in another order, so the losses agree to 1e-6. On a GPU `--device.deterministic`
asks torch for deterministic kernels; without it, runs of one seed differ in the last digits from the
first steps on. The same bits are not guaranteed on another kind of processor, with another version of
torch, or with compiled blocks whose kernels were tuned again."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
