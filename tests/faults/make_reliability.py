"""`make faults`: injects every fault, fuzzes, loads, and writes docs/reliability.md with what happened.

python tests/faults/make_reliability.py            the whole set: at most 15 minutes on two cores
"""

import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import consistency
import fuzz
import load
import scenarios
import torch

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
FUZZ_CASES = 24_000
DRAWS = 240  # configurations that must agree with themselves
FORGED_CASES = 20_000  # more of those behind a checksum


def in_own_folder(work: Callable[..., Any], *args: object) -> Any:
    torch.set_num_threads(1)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        done = work(Path(folder), *args)
    seconds = time.perf_counter() - began
    print(f"{seconds:6.0f} s  {done}", flush=True)
    return done


def fuzz_half(seed: int, cases: int, only: str = "") -> tuple[Counter[str], list[str]]:
    torch.set_num_threads(1)
    return fuzz.fuzz(cases // 2, seed, only)


def agree(seed: int) -> list[str]:
    torch.set_num_threads(1)
    return consistency.consistency(DRAWS // 2, seed)


def main() -> int:
    began = time.perf_counter()
    # Two at a time: one for each of two cores. The faults with most waiting go first.
    with ProcessPoolExecutor(2) as pool:
        rows = {
            name: pool.submit(in_own_folder, scenario, times)
            for name, (scenario, _, times) in scenarios.SCENARIOS.items()
        }
        loads = [pool.submit(in_own_folder, one) for one in load.LOADS]
        halves = [pool.submit(fuzz_half, seed, FUZZ_CASES) for seed in (0, 1)]
        halves += [pool.submit(fuzz_half, seed, FORGED_CASES, "forged") for seed in (2, 3)]
        drawn = [pool.submit(agree, seed) for seed in (1, 2)]
        failed = []
        table, loaded = [], []
        for name, future in rows.items():
            try:
                table.append(future.result())
            except Exception as error:
                failed.append(f"{name}: {error}")
                print("FAILED", failed[-1], flush=True)
        for future in loads:
            try:
                loaded.append(future.result())
            except Exception as error:
                failed.append(f"load: {error}")
                print("FAILED", failed[-1], flush=True)
        counts: Counter[str] = Counter()
        for half in halves:
            own, findings = half.result()
            counts += own
            failed += findings
        for own in drawn:
            failed += own.result()
    print(f"        fuzz: {sum(counts.values()):,} cases, {len(failed)} findings or failures", flush=True)
    minutes = (time.perf_counter() - began) / 60
    if failed:
        print("\n".join(failed))
        return 1
    PAGE.write_text(page(table, loaded, counts, minutes), encoding="utf-8")
    print(f"written: {PAGE} ({minutes:.1f} minutes)")
    return 0


def page(table: list[Any], loaded: list[Any], counts: Counter[str], minutes: float) -> str:
    kinds = sorted({name.partition(":")[0] for name in counts})
    fuzzed = [
        f"| {kind} | {counts[f'{kind}: accepted']:,} | {counts[f'{kind}: refused']:,} |" for kind in kinds
    ]
    forged = sum(count for name, count in counts.items() if name.startswith("forged"))
    parts = [
        HEAD.format(minutes=minutes, cores=os.cpu_count()),
        "| fault | how it is injected | times | what happened | what was lost |\n|---|---|---:|---|---|",
        "\n".join(f"| {r.fault} | {r.injected} | {r.times} | {r.happened} | {r.lost} |" for r in table),
        WORLD,
        f"## Bad input\n{FUZZ}\n\n| what is damaged | accepted | refused |\n|---|---:|---:|",
        "\n".join(fuzzed),
        f"\n{sum(counts.values()):,} cases in all, {forged:,} of them forged; no other exception, "
        "and none took 10 s.\n",
        AGREED.format(draws=DRAWS),
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

`make faults` injects every fault into real processes and writes this page. The last time it took
{minutes:.0f} minutes on {cores} cores. `make test` includes a short version.

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
{draws} tiny models are drawn: rule, prelude, coda, injection, first state, gate, rounds and how they are
sampled, batch, one corpus or a mixture, with or without a last phase. Of each,
- a resume is the uninterrupted run bit for bit, and within 1e-4 with another micro-batch;
- with another batch and more steps no sequence comes twice, the last phase has its share of all steps,
  and the rounds go on rising as they did;
- `--init-from` starts at the loss of the run or of its export, and a field that would change it is refused
  from Python;
- `deeploop validate` says what training said, and the export in transformers gives the run's logits.
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
    sys.exit(main())
