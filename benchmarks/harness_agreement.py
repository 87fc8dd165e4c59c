"""Compare our adapter with the harness' own `hf` backend on the same weights.

    deeploop export RUN FOLDER
    python benchmarks/harness_agreement.py RUN FOLDER --data DIR

Scores the first 100 documents of each of the eight tasks (0-shot, fp32, CPU) with both: ours from the run
folder, `hf` from the exported one. Prints the largest difference in log-likelihood, and how many documents
get another answer although their two likeliest are further apart than the tolerance. Exits with 1 unless all
agree. Needs `pip install ".[eval,hf]" accelerate`.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import numpy as np
from lm_eval.models.huggingface import HFLM

import deeploop
import deeploop.models.hf  # tells transformers of the exported model
from deeploop.eval.harness import HarnessLM, set_shots
from deeploop.eval.scoring import score
from deeploop.eval.tasks import PAPER_TASKS, load_tasks, quiet
from deeploop.report.tables import text_table

TOLERANCE = 1e-4


def compare(instances: list, ours: np.ndarray, theirs: np.ndarray) -> tuple[float, int, int]:
    """Largest difference; documents with another answer; those of them that are no ties."""
    documents: dict[int, list[int]] = {}
    for row, instance in enumerate(instances):
        documents.setdefault(instance.doc_id, []).append(row)
    other = [rows for rows in documents.values() if ours[rows].argmax() != theirs[rows].argmax()]
    margins = [np.subtract(*np.sort(ours[rows])[:-3:-1]) for rows in other]
    return float(np.abs(ours - theirs).max()), len(other), sum(margin > TOLERANCE for margin in margins)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, help="local files of the tasks; else they are downloaded")
    parser.add_argument("--items", type=int, default=100)
    options = parser.parse_args()

    model, tokenizer = deeploop.load(options.run)
    ours = HarnessLM(tokenizer, partial(score, model))
    theirs = HFLM(str(options.folder), device="cpu", dtype="float32", batch_size=16)
    rows = []
    for name, task in set_shots(load_tasks(list(PAPER_TASKS), options.data), 0)["tasks"].items():
        with quiet():
            task.build_all_requests(limit=options.items, rank=0, world_size=1)
        scores = [np.array(lm.loglikelihood(task.instances))[:, 0] for lm in (ours, theirs)]
        rows.append((name, len(task.instances), *compare(task.instances, *scores)))
    header = ("task", "requests", "max |difference|", "other answers", "not ties")
    print(
        text_table(header, [(name, str(n), f"{worst:.1e}", str(m), str(k)) for name, n, worst, m, k in rows])
    )
    sys.exit(any(worst > TOLERANCE or wrong for _, _, worst, _, wrong in rows))


if __name__ == "__main__":
    main()
