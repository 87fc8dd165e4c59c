"""assets/rules.json and the tables of docs/rules.md are those that docs/results makes, to the byte."""

import importlib.util
import json
import math
from pathlib import Path

import pytest

from deeploop.report.evidence import FILE, read_evidence
from deeploop.report.recommend import recommend
from run_folders import FLOOR, write_run

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("rules_table", ROOT / "tools" / "rules_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_file_and_page_are_in_step(tool):
    studies = tool.collect(ROOT / "docs" / "results")
    assert tool.rules_json(studies) == FILE.read_text(encoding="utf-8"), "run: make results"
    page = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
    assert tool.filled(page, tool.BEGIN, tool.END, tool.tables(studies)) == page, "run: make results"


def test_it_is_made_from_runs_and_read_back(tool, tmp_path):
    for block, fallen in (("flat", ()), ("sandwich", (8e-3, 1.6e-2))):
        for R in (1, 4, 16):
            for peak in (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2):
                for seed in (0, 1):
                    lost = R == 16 and peak in fallen
                    write_run(
                        tmp_path / "transfer" / f"{block}-rounds{R}-peak_lr{peak:g}-seed{seed}",
                        block=block, rounds=R, seed=seed, peak_lr=peak, similarity=1.0 if lost else 0.2,
                        loss=FLOOR if lost else 2 + 0.003 * seed + 0.05 * math.log2(peak / 5.3e-3) ** 2,
                        model={"unigram_bias": True},
                    )  # fmt: skip
    text = tool.rules_json(tool.collect(tmp_path))
    assert text == tool.rules_json(tool.collect(tmp_path))
    path = tmp_path / "rules.json"
    path.write_text(text)
    (evidence,) = read_evidence(path)
    assert json.loads(text) == json.loads(json.dumps(tool.to_json([evidence])))
    ((name, study),) = tool.collect(tmp_path)
    assert tool.evidence_of(study, f"docs/results/{name}") == evidence
    tables = tool.tables([(name, study)])
    assert "| flat | 5.30e-03 " in tables
    assert "(results/transfer/rates-a.png)" in tables
    flat, deeploop = sorted(evidence.rules, key=lambda rule: rule.rule != "flat")
    assert (flat.rule, flat.transfers, flat.rates[-1].peak) == ("flat", True, 0.0053)
    assert [rate.mark for rate in deeploop.rates] == ["", "", "cliff"]
    found = recommend(2, 16, 32, evidence=[evidence])
    assert (found.rule, found.peak_lr) == ("flat", 5.3e-3)
    assert "flat-rounds16-peak_lr0.004-seed0" in found.runs
