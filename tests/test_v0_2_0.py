"""Folders that version 0.2.0 wrote are read, evaluated, resumed and exported with the same numbers.

tests/v0_2_0/make.py made them with the code of 0.2.0; expected.json holds what that code computed.
"""

import ast
import importlib.util
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import deeploop
from deeploop.cli import main
from deeploop.eval.generation import GREEDY, generate
from deeploop.runs.folder import load_any_config
from deeploop.runs.packed import unpack
from deeploop.sweep.cells import SweepFolder
from deeploop.sweep.grid import read_grid
from deeploop.sweep.run import cell_with_vocabulary
from deeploop.sweep.tuning import tuned
from deeploop.train.metrics import read_metrics
from deeploop.train.rundir import load_model

FOLDER = Path(__file__).parent / "v0_2_0"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
PROMPT = "the loop "
RULES = [
    "language", "flat", "parts", "deepnorm", "factored", "averaged", "prenorm", "postnorm", "recurrent"
]  # fmt: skip
TRAINED = [name for name in EXPECTED["resumed"] if "/" not in name]
CELLS = {"sandwich-p0.25", "sandwich-p0.5"}
EXPORTS = {"language": "export", **{name: f"exports/{name}" for name in ("flat", "parts", "deepnorm")}}
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers"
)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """Copy all folders."""
    ignored = shutil.ignore_patterns("__pycache__")
    return shutil.copytree(FOLDER, tmp_path_factory.mktemp("v0_2_0") / "old", ignore=ignored)


@pytest.fixture(autouse=True)
def inside(copy, monkeypatch):
    """Run each test in the copy: paths in the files are relative to it."""
    monkeypatch.chdir(copy)


@pytest.fixture
def deep(capsys):
    """`deep("runs language")`: run a command, which must succeed, and return what it prints."""

    def run(command):
        capsys.readouterr()
        code = main(command.split())
        said = capsys.readouterr()
        assert code == 0, said.err
        return said.out

    return run


def close(value):
    return pytest.approx(value, rel=1e-5, abs=1e-7)


def losses(folder):
    return [line["loss"] for line in read_metrics(Path(folder)) if line["kind"] == "validation"]


def same_weights(one, other):
    ours, theirs = (load_model(Path(run)).state_dict() for run in (one, other))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# ── Listing and reporting ───────────────────────────────────────────────────────────────────────────────
def test_runs_lists_every_run_with_its_loss(deep):
    found = {Path(run["folder"]).as_posix(): run for run in json.loads(deep("runs . --json"))}
    states = {name: run["state"] for name, run in found.items() if "/" not in name}
    assert states == {**dict.fromkeys(TRAINED, "finished"), "retrofit": "untrained"}
    for name in [*TRAINED, *(f"sweep/{cell}" for cell in CELLS)]:
        loss = EXPECTED["validation"].get(name)
        assert found[name]["loss"] == close(losses(name)[-1] if loss is None else loss)
    assert {name for name in found if name.startswith("pack/")} == {f"pack/{cell}" for cell in CELLS}
    listed = deep("runs .")
    assert all(name in listed for name in TRAINED)


def test_report_has_every_run(deep, undrawn, tmp_path):
    deep(f"report . --out {tmp_path}")
    text = (tmp_path / "report.md").read_text()
    names = [*TRAINED, *CELLS, *(path.name for path in Path("search").iterdir() if path.is_dir())]
    assert [name for name in names if name not in text] == []


# ── Evaluation ──────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("name", EXPECTED["validation"])
def test_loss_and_greedy_tokens(name, deep):
    record = json.loads(deep(f"validate {name} --device cpu --json"))
    assert record["rounds"][0]["loss"] == close(EXPECTED["validation"][name])
    model, tokenizer = deeploop.load(name)
    tokens = list(generate(model, tokenizer.encode(PROMPT), max_tokens=12, sampling=GREEDY))
    assert tokens == EXPECTED["tokens"][name]


def test_loss_at_other_rounds(deep, monkeypatch):
    monkeypatch.setattr("deeploop.report.plots.save_png", lambda figure, path: path.write_bytes(b"\x89PNG"))
    record = json.loads(deep("validate language --rounds 1 2 4 --device cpu --json"))
    assert {str(row["rounds"]): row["loss"] for row in record["rounds"]} == close(
        EXPECTED["depth"]["language"]
    )


def test_generate_prints_the_same_text(capsys):
    words = ["generate", "language", "--prompt", PROMPT, "--max-tokens", "12", "--temperature", "0"]
    assert main([*words, "--device", "cpu"]) == 0
    assert capsys.readouterr().out == PROMPT + bytes(EXPECTED["tokens"]["language"]).decode() + "\n"


@pytest.mark.parametrize("name", EXPECTED["evaluation"])
def test_evaluation(name, deep, undrawn):
    record = json.loads(deep(f"eval {name} --device cpu --json"))
    for key, value in EXPECTED["evaluation"][name].items():
        ours, theirs = (torch.tensor(numbers, dtype=torch.float64) for numbers in (record[key], value))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_chat_answers(deep, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("say loop\n"))
    assert deep("chat chat --temperature 0 --max-tokens 6 --device cpu").endswith("\n")


# ── Training ────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("name", EXPECTED["resumed"])
def test_resume_continues_as_0_2_0_did(name, deep, tmp_path):
    """Weights, moments, generators and the place in the data: after two steps the loss is the same."""
    run = shutil.copytree(name, tmp_path / "run")
    step = json.loads((run / "run.json").read_text())["ended"]["step"]
    deep(f"train --resume {run} --optim.steps {step + 2} --quiet")
    assert json.loads((run / "run.json").read_text())["ended"] == {"how": "finished", "step": step + 2}
    assert losses(run)[-1] == close(EXPECTED["resumed"][name])


@pytest.mark.parametrize("name", [name for name in EXPECTED["repeated"] if name != "config.toml"])
def test_an_old_config_trains_the_same_model(name, deep, tmp_path):
    """The initialisation too: a fresh run of three steps has the loss that 0.2.0 reached."""
    steps = "--optim.steps 3 --optim.warmup-steps 2 --optim.batch 4 --quiet"
    deep(f"train --config {name}/config.json --out {tmp_path / 'again'} {steps}")
    assert losses(tmp_path / "again")[-1] == close(EXPECTED["repeated"][name])


def test_an_old_reasoner_keeps_the_alpha_that_it_was_trained_with():
    """0.2.0 counted N in the graph, 2 blocks; the paper's count of this schedule is 3."""
    saved = load_any_config(Path("hrm")).model
    assert (saved.N, saved.depth_from, saved.scales_of("L").alpha) == (2, "graph", 2.0)
    assert replace(saved, depth_from="cycles").N == 3


def test_an_old_config_in_toml(deep, tmp_path):
    deep(f"train --config config.toml --quiet --out {tmp_path / 'run'}")
    assert losses(tmp_path / "run")[-1] == close(EXPECTED["repeated"]["config.toml"])


@pytest.mark.parametrize("name", ["flat", "parts"])
def test_start_from_the_weights_of_an_old_run(name, deep, tmp_path):
    still = "--optim.steps 1 --optim.peak-lr 0 --optim.floor-lr 0 --optim.batch 4 --quiet"
    deep(f"train --config {name}/config.json --init-from {name} --out {tmp_path / 'again'} {still}")
    assert losses(tmp_path / "again") == close([EXPECTED["validation"][name]] * 2)
    assert same_weights(tmp_path / "again", name)


# ── Exports ─────────────────────────────────────────────────────────────────────────────────────────────
@needs_transformers
@pytest.mark.parametrize("name", [*RULES, "chat", "retrofit", "retrofit-healed"])
def test_old_runs_are_exported(name, deep, tmp_path):
    from deeploop.models.hf import DeepLoopForCausalLM

    deep(f"export {name} {tmp_path / 'new'}")
    model, tokenizer = deeploop.load(name)
    tokens = torch.tensor([tokenizer.encode(PROMPT)])
    with torch.no_grad():
        ours = model.logits(model(tokens).states)
        theirs = DeepLoopForCausalLM.from_pretrained(tmp_path / "new").eval()(tokens).logits
    torch.testing.assert_close(theirs, ours)


def imported(source):
    """Yield the packages that a source file imports by their full names."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.partition(".")[0]


@pytest.fixture
def from_own_files(monkeypatch):
    """Load a folder as transformers does where deeploop is not installed: by the code in the folder."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    monkeypatch.delitem(CONFIG_MAPPING._extra_content, "deeploop", raising=False)

    def load(folder):
        assert "deeploop" not in {name for path in Path(folder).glob("*.py") for name in imported(path)}
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
        assert type(model).__module__.startswith("transformers_modules.")
        return model

    return load


@needs_transformers
@pytest.mark.parametrize("name", EXPORTS)
def test_transformers_loads_an_old_export(name, from_own_files, tmp_path):
    from transformers import AutoTokenizer

    folder = shutil.copytree(EXPORTS[name], tmp_path / f"old-{name}")
    for source in Path("export").glob("*.py"):
        shutil.copy(source, folder)  # left out of exports/, as they are the same
    model = from_own_files(folder)
    prompt = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt")
    said = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, -12:]
    assert said.tolist() == EXPECTED["tokens"][name]
    if name == "language":
        check_logits(model)


@needs_transformers
def test_transformers_loads_a_new_export_of_an_old_run(deep, from_own_files, tmp_path):
    deep(f"export language {tmp_path / 'new'}")
    check_logits(from_own_files(tmp_path / "new"))


def check_logits(model):
    with torch.no_grad():
        logits = model(torch.tensor(EXPECTED["export"]["tokens"])).logits[..., :257].double()
    assert float(logits.square().sum()) == close(EXPECTED["export"]["sum_of_squares"])
    assert logits[-1, -1, :8].tolist() == close(EXPECTED["export"]["last"])


@needs_transformers
@pytest.mark.parametrize("name", EXPORTS)
def test_the_present_class_reads_an_old_export(name):
    """With deeploop imported, transformers takes its class, not the files of the export."""
    from deeploop.models.hf import DeepLoopForCausalLM

    ours, theirs = load_model(Path(name)), DeepLoopForCausalLM.from_pretrained(EXPORTS[name]).eval()
    tokens = torch.tensor(EXPECTED["export"]["tokens"])
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours.logits(ours(tokens).states))


@pytest.mark.parametrize("name", EXPORTS)
def test_start_from_an_old_export(name, deep, tmp_path):
    """Its config must be that of the run: as a fresh run's weights, and as the model of a chat."""
    still = "--optim.steps 1 --optim.peak-lr 0 --optim.floor-lr 0 --quiet"
    start = f"--init-from {EXPORTS[name]} --optim.batch 2 {still}"
    deep(f"train --config {name}/config.json {start} --out {tmp_path / 'again'}")
    assert losses(tmp_path / "again") == close([EXPECTED["validation"][name]] * 2)
    deep(f"train chat {start} --device.kind cpu --data.path conversations --out {tmp_path / 'talk'}")
    assert load_model(tmp_path / "talk").config == load_model(Path(name)).config
    assert same_weights(tmp_path / "talk", name)


# ── Sweeps ──────────────────────────────────────────────────────────────────────────────────────────────
def test_an_old_grid_names_the_same_cells(deep):
    said = deep("sweep grid.toml --dry-run")
    assert all(cell in said for cell in CELLS)
    assert "2 cells" in said


@pytest.mark.parametrize("folder", ["sweep", "pack"])
def test_an_old_sweep_is_finished(folder, deep):
    said = deep(f"sweep grid.toml --out {folder}")
    assert "all 2 cells were finished already" in said
    said = deep(f"sweep grid.toml --out {folder} --status")
    assert "2 of 2 cells finished" in said
    assert all(cell in said for cell in CELLS)
    assert "4.9506" in said


def test_a_missing_cell_of_an_old_sweep_is_trained(deep, tmp_path):
    """In this process, by the command that the sweep would start another one with."""
    out = shutil.copytree("sweep", tmp_path / "sweep")
    shutil.rmtree(out / "sandwich-p0.25")
    for path in out.glob("sandwich-p0.25.*"):
        path.unlink()
    grid = read_grid(Path("grid.toml"))
    folder = SweepFolder(out, grid, [cell_with_vocabulary(cell) for cell in grid.cells({})])
    folder.write()
    commands = [command for cell in folder.cells if (command := folder.next_command(cell))]
    assert len(commands) == 1
    deep(" ".join(commands[0][commands[0].index("train") :]))
    assert losses(out / "sandwich-p0.25")[-1] == close(EXPECTED["validation"]["sweep/sandwich-p0.25"])
    assert [folder.next_command(cell) for cell in folder.cells] == [None, None]


def test_an_old_search_gives_its_best_trial(deep):
    assert "4 of 4 cells finished" in deep("sweep search.toml --out search --status")
    said = deep("sweep tuned.toml --tuned search --dry-run")
    assert "rounds4-deepnorm" in said
    cells = tuned(read_grid(Path("tuned.toml")).cells({}), Path("search"), {})
    assert [cell.config().optim.peak_lr for cell in cells] == [1e-2] * 4


def test_an_old_pack_is_read_and_unpacked(deep, undrawn, tmp_path):
    def listed(folder):
        return {Path(run["folder"]).name: run["loss"] for run in json.loads(deep(f"runs {folder} --json"))}

    wanted = {cell: close(EXPECTED["validation"][f"sweep/{cell}"]) for cell in CELLS}
    assert listed("pack") == wanted
    deep(f"report pack --out {tmp_path}")
    assert all(cell in (tmp_path / "report.md").read_text() for cell in CELLS)
    (tmp_path / "unpacked").mkdir()
    unpack(Path("pack/runs.tar.xz"), tmp_path / "unpacked")
    assert listed(tmp_path / "unpacked") == wanted
