"""`deeploop import`: a public checkpoint gives the model that it was, and `eval` takes it."""

import json
import math
from collections import defaultdict
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from deeploop.cli import main
from deeploop.models.public_reasoner import config_of, our_names
from deeploop.models.reasoner import Reasoner
from deeploop.models.reasoner_config import HRMConfig, PuzzleShape, TRMConfig
from deeploop.tasks.puzzles.data.arc import build_arc, read_task
from deeploop.tasks.puzzles.data.sudoku import build_sudoku
from deeploop.tasks.puzzles.load import load_reasoner
from public_arc import SEPARATORS, small_tasks, write_public
from public_weights import as_public

SHAPE = PuzzleShape(6, 16, 1)
SIZE = {"width": 16, "heads": 2, "hidden": 32}
MODELS = {
    "hrm": HRMConfig(**SIZE, high_blocks=1, low_blocks=2),
    "trm": TRMConfig(**SIZE, low_cycles=6),
    "trm-mlp": TRMConfig(**SIZE, low_cycles=6, mixer="mlp"),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("import")
    build_sudoku(folder / "sudoku", size=4, train=4, test=2)
    for name, config in MODELS.items():
        model = Reasoner(config, SHAPE, seed=3)
        with torch.no_grad():
            model.puzzles.normal_(std=0.1)
            model.halting.weight.normal_()
        torch.save(as_public(model), folder / f"{name}.pt")
        torch.save(model.state_dict(), folder / f"{name}.ours")
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_the_weights_come_back_and_eval_takes_the_run(home, name, capsys):
    out = home / f"run-{name}"
    words = ["import", name[:3], str(home / f"{name}.pt"), "--data", str(home / "sudoku")]
    assert main([*words, "--out", str(out), "--heads", "2", "--segments", "2"]) == 0
    assert f"next: deeploop eval {out}" in capsys.readouterr().out
    model, config = load_reasoner(out)
    assert config.model == MODELS[name]
    wanted = torch.load(home / f"{name}.ours")
    assert all(torch.equal(tensor, wanted[key]) for key, tensor in model.state_dict().items())
    assert main(["eval", str(out), "--device", "cpu"]) == 0
    assert json.loads((out / "run.json").read_text())["imported"]["file"] == f"{name}.pt"


# ── The published equations, on the weights as they are saved ──────────────────────────────────────────
def normed(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


def swiglu(x, weights, name):
    gate, up = (x @ weights[f"{name}.gate_up_proj.weight"].T).chunk(2, -1)
    return (F.silu(gate) * up) @ weights[f"{name}.down_proj.weight"].T


def attended(x, weights, name, heads):
    """Joined queries, keys and values of all heads; dimension i turns with i + half."""
    parts = (x @ weights[f"{name}.qkv_proj.weight"].T).chunk(3, -1)
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
    half = q.shape[-1] // 2
    angle = torch.outer(torch.arange(x.shape[1]).double(), 10000.0 ** (-torch.arange(half).double() / half))
    turn = torch.polar(torch.ones_like(angle), angle)
    q, k = (torch.complex(y[..., :half], y[..., half:]) * turn for y in (q, k))
    q, k = (torch.view_as_real(y).flatten(-2) for y in (q, k))
    scores = q @ k.mT / math.sqrt(2 * half)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ weights[f"{name}.o_proj.weight"].T


def published(weights, config, tokens, puzzles):
    """Logits and q of one segment from the initial states, by the names that the public code saves."""
    weights = {name.removeprefix("_orig_mod.model.inner."): w.double() for name, w in weights.items()}

    def call(level, z, other):
        z = z + other
        for block in range(len([name for name in weights if name.startswith(level) and "mlp.down" in name])):
            name = f"{level}.layers.{block}"
            if config.mixer == "mlp":
                across = z.transpose(1, 2)
                z = normed(across + swiglu(across, weights, f"{name}.mlp_t")).transpose(1, 2)
            else:
                z = normed(z + attended(z, weights, f"{name}.self_attn", config.heads))
            z = normed(z + swiglu(z, weights, f"{name}.mlp"))
        return z

    first = F.pad(weights["puzzle_emb.weights"][puzzles][:, None], (0, 0, 0, config.puzzle_positions - 1))
    board = weights["embed_tokens.embedding_weight"][tokens]
    x = math.sqrt(config.width) * torch.cat([first, board], 1)
    z_H, z_L = weights["H_init"].expand_as(x), weights["L_init"].expand_as(x)
    for _ in range(config.cycles):
        for _ in range(config.low_cycles):
            z_L = call("L_level", z_L, z_H + x)
        z_H = call("H_level" if "H" in config.blocks_of else "L_level", z_H, z_L)
    logits = (z_H @ weights["lm_head.weight"].T)[:, config.puzzle_positions :]
    return logits, z_H[:, 0] @ weights["q_head.weight"].T + weights["q_head.bias"]


@pytest.mark.parametrize("length", [16, 900])
@pytest.mark.parametrize("name", MODELS)
def test_an_imported_model_is_the_published_one(home, name, length):
    """On a board and, with fewer cycles, at ARC's length; HRM's two modules, and TRM's one in both roles."""
    config, shape = MODELS[name], PuzzleShape(6, length, 3)
    if length == 900:
        config = replace(config, cycles=1, low_cycles=2)
    source = Reasoner(config, shape, seed=5)
    with torch.no_grad():
        source.puzzles.normal_(std=0.3)
        source.halting.weight.normal_()
    public = as_public(source)
    weights = our_names(public)
    told = {"heads": 2, "cycles": config.cycles, "low_cycles": config.low_cycles}
    model = Reasoner(config_of(weights, told, length), shape)
    model.load_state_dict(weights)
    model.double()
    half = torch.arange(model.config.head_size // 2).double()
    angle = torch.outer(torch.arange(model.positions).double(), 10000.0 ** (-half / len(half)))
    model.cos, model.sin = angle.cos(), angle.sin()  # in place of the table in fp32
    tokens, ids = torch.randint(6, (2, length)), torch.tensor([2, 0])
    with torch.no_grad():
        segment = model(model.initial(2), tokens, model.puzzle_rows(ids))
        logits, q = published(public, config, tokens, ids)
    torch.testing.assert_close(segment.logits, logits, rtol=0, atol=1e-10)
    torch.testing.assert_close(segment.q, q, rtol=0, atol=1e-10)


# ── ARC: the votes that the public code counts on its own build ────────────────────────────────────────
def cropped(tokens):
    """The largest top-left rectangle of colours, the first of equal ones."""
    board, best, width = tokens.reshape(30, 30), (0, 0), 30
    for height in range(1, 31):
        colours = (board[height - 1, :width] >= 2).tolist()
        width = colours.index(False) if False in colours else width
        if height * width > best[0] * best[1]:
            best = height, width
    return board[: best[0], : best[1]].astype(int) - 2


def unturned(name, separator, tokens):
    """A task's name and the grid before its view, by the name of the id."""
    task, *view = name.split(separator)
    grid = cropped(tokens)
    if view:
        back = [0, 3, 2, 1, 4, 5, 6, 7][int(view[0][1:])]
        quarter = {1: 1, 2: 2, 3: 3, 7: 1}.get(back, 0)
        turned = np.rot90(grid, quarter) if back != 6 else grid.T
        turned = np.fliplr(turned) if back in (4, 7) else np.flipud(turned) if back == 5 else turned
        grid = np.argsort([int(colour) for colour in view[1]])[turned]
    return task, json.dumps(grid.tolist())


def ranked_answers(folder, kind, weights, config):
    """{task: {input: answers, best first}} by count and mean confidence, from the public files."""
    names, separator = json.loads((folder / "identifiers.json").read_text()), SEPARATORS[kind]
    inputs, ids, starts = (
        np.load(folder / "test" / f"all__{name}.npy")
        for name in ("inputs", "puzzle_identifiers", "puzzle_indices")
    )
    ids = np.repeat(ids, np.diff(starts))
    logits, q = published(weights, config, torch.from_numpy(inputs).long(), torch.from_numpy(ids).long())
    votes = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    answers = zip(ids, inputs, logits.argmax(-1).numpy(), q[:, 0].sigmoid().tolist(), strict=True)
    for own, asked, answer, confidence in answers:
        task, grid = unturned(names[own], separator, asked)
        votes[task][grid][unturned(names[own], separator, answer)[1]].append(confidence)
    return {
        task: {
            asked: sorted(own, key=lambda g: (len(own[g]), fmean(own[g])), reverse=True)
            for asked, own in of.items()
        }
        for task, of in votes.items()
    }


@pytest.mark.parametrize("kind", ["hrm", "trm"])
def test_arc_votes_are_those_of_the_public_code(tmp_path, monkeypatch, kind):
    """The held-out outputs are made the last of the ranked answers, so that the score differs with K."""
    monkeypatch.chdir(tmp_path)
    tasks, config = small_tasks(), replace(MODELS[kind], cycles=1, low_cycles=1)
    names = write_public(tmp_path / "guess", tasks, kind, views=5)
    source = Reasoner(config, PuzzleShape(12, 900, len(names)), seed=6)
    drawn = torch.Generator().manual_seed(0)  # with other draws, every answer may be an empty grid
    with torch.no_grad():
        source.puzzles.normal_(generator=drawn)
        source.halting.weight.normal_(generator=drawn)
    public = as_public(source)
    torch.save(public, "step_1")
    ranked = ranked_answers(tmp_path / "guess", kind, public, config)
    places: dict[str, list[int]] = {}
    for name in ("c3", "d4"):
        train, test = tasks[name]
        own = [[json.loads(answer) for answer in answers] for answers in ranked[name].values()]
        # No task asks for an empty grid, which a prediction may be.
        places[name] = [
            [at for at, answer in enumerate(answers, 1) if answer and answer[0]][-1] for answers in own
        ]
        outputs = [np.array(answers[at - 1], np.uint8) for answers, at in zip(own, places[name], strict=True)]
        tasks[name] = train, [(asked, output) for (asked, _), output in zip(test, outputs, strict=True)]
    write_public(tmp_path / "build", tasks, kind, views=5)
    assert main(["prepare", "arc", "--from-public", "build", "--out", "arc"]) == 0
    words = [
        "--data",
        "arc",
        "--out",
        "run",
        "--heads",
        "2",
        "--segments",
        "1",
        "--cycles",
        "1",
        "--low-cycles",
        "1",
    ]
    assert main(["import", kind, "step_1", *words]) == 0
    assert main(["eval", "run", "--device", "cpu"]) == 0
    (result,) = json.loads((tmp_path / "run" / "eval.json").read_text())["evaluations"]
    assert result["places"] == places
    wanted = {str(K): fmean(max(own) <= K for own in places.values()) for K in (1, 2, 10, 100, 1000)}
    assert result["ladder"] == wanted
    assert wanted["1"] < wanted["10"]
    assert not [line for line in result["deviations"] if "epochs" in line]  # it was trained elsewhere


def test_trm_on_arc_has_the_cycles_of_its_arc_command(tmp_path):
    names = write_public(tmp_path / "build", small_tasks(), "trm")
    assert (
        main(["prepare", "arc", "--from-public", str(tmp_path / "build"), "--out", str(tmp_path / "arc")])
        == 0
    )
    torch.save(as_public(Reasoner(MODELS["trm"], PuzzleShape(12, 900, len(names)))), tmp_path / "step_1")
    words = ["import", "trm", str(tmp_path / "step_1"), "--data", str(tmp_path / "arc"), "--heads", "2"]
    assert main([*words, "--out", str(tmp_path / "run")]) == 0
    assert load_reasoner(tmp_path / "run")[1].model.low_cycles == 4


def test_a_build_that_was_not_prepared_says_how(home, tmp_path, capsys):
    write_public(tmp_path / "build", small_tasks())
    assert main(["import", "hrm", str(home / "hrm.pt"), "--data", str(tmp_path / "build")]) == 2
    assert f"`deeploop prepare arc --from-public {tmp_path / 'build'}`" in capsys.readouterr().err


def test_another_build_of_arc_is_refused(home, tmp_path, capsys):
    grid = [[1, 2], [0, 3]]
    task = {key: [{"input": grid, "output": grid}] for key in ("train", "test")}
    build_arc([read_task(task, "evaluation", "a", tmp_path)], tmp_path / "arc", augmentations=2)
    assert main(["import", "hrm", str(home / "hrm.pt"), "--data", str(tmp_path / "arc")]) == 2
    assert "prepare that with `deeploop prepare arc --from-public FOLDER`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trm", "hrm.pt"], "hrm.pt: holds an HRM, not trm"),
        (["hrm", "trm.pt"], "trm.pt: holds no HRM, not hrm"),
        (["hrm", "nowhere.pt"], "nowhere.pt"),
        (["hrm", "code.pt"], "code.pt: can't be read as a checkpoint"),
        (["hrm", "learned.pt"], "embed_pos.embedding_weight: not a weight of HRM's or TRM's public code"),
        (["hrm", "larger.pt"], "checkpoint: has vocabulary 7, the puzzles have 6"),
        (["hrm", "hrm.pt", "--out", "sudoku"], "out=sudoku: is not empty"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(home, monkeypatch, capsys, words, message):
    monkeypatch.chdir(home)
    torch.save({"a": main}, "code.pt")  # would import our code when it is unpickled
    hrm = torch.load("hrm.pt")
    torch.save(hrm | {"model.inner.embed_pos.embedding_weight": torch.zeros(2, 2)}, "learned.pt")
    torch.save(hrm | {"_orig_mod.model.inner.embed_tokens.embedding_weight": torch.zeros(7, 16)}, "larger.pt")
    assert main(["import", *words, "--data", "sudoku", "--heads", "2"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (home / "runs").exists()
