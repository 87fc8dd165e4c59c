"""`deeploop doctor`: extras are pyproject's, a missing one has its install line, the self-test can fail."""

import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from deeploop.cli import COMMANDS, main
from deeploop.commands import doctor

ROOT = Path(__file__).parents[2]


def test_it_says_what_is_there_and_passes(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(doctor.tempfile, "tempdir", None)  # read TMPDIR anew
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    named = [re.split(r"\s{2,}|(?<=extra tensorboard) ", line)[0] for line in lines]
    assert named[:2] == ["deeploop", "Python"]
    assert named[-7:] == ["Triton", "torch", "GPU", "training uses", "FP8", "self-test", "passed"]
    assert re.search(r"(eager modules|compiled blocks|Triton kernels), (fp32|bf16)", lines[-4])
    first, last = map(float, re.search(r"loss (\S+) → (\S+),", lines[-1]).groups())
    assert last < first - 0.1  # the bias of the recipe starts at the unigram floor
    # torch makes the folder of its inductor when that is imported, which building an optimizer does
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith("torchinductor_")]


def test_what_is_known_without_torch_comes_before_its_import():
    """Its import takes seconds."""
    code = (
        "import sys\nfrom deeploop.commands.doctor import installed\n"
        "for name, _ in installed():\n    print(name, 'torch' in sys.modules)"
    )
    lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = {
        name: known == "True" for name, _, known in (line.rpartition(" ") for line in lines.splitlines())
    }
    assert [name for name, known in loaded.items() if known] == ["torch", "GPU"]


def test_the_extras_are_pyprojects():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = doctor.extras()
    assert set(found) == set(declared) - {"dev"}
    for extra, packages in found.items():
        assert packages == [re.match(r"[\w-]+", requirement)[0] for requirement in declared[extra]]


def test_what_is_missing_has_its_install_line():
    line = doctor.describe_extra("data", ["numpy", "no-such-package"])
    assert line == 'no-such-package not installed; pip install -c constraints.txt -e ".[data]" in the clone'
    assert re.fullmatch(r"numpy \d\S+", doctor.describe_extra("data", ["numpy"]))


def test_a_loss_that_rises_fails_the_test(tmp_path):
    config = doctor.small_config(tmp_path)
    wild = replace(config, optim=replace(config.optim, peak_lr=10.0, floor_lr=10.0, warmup_steps=1))
    with pytest.raises(ValueError, match=r"self-test: after 20 steps the loss is \d+\.\d+, it started at 4"):
        doctor.self_test(wild)


def test_the_documented_completion_knows_every_command():
    page = (ROOT / "docs" / "custom-task.md").read_text()
    line = re.search(r"^complete .* -W .*$", page, re.MULTILINE)[0]
    script = f'deeploop() {{ "{sys.executable}" -m deeploop "$@"; }}; {line}; complete -p deeploop'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True)
    words = re.search(r"-W '([^']*)'", done.stdout)[1].split()
    assert set(words) == set(COMMANDS)


@pytest.mark.parametrize("version", ["13.0", None])
def test_a_torch_without_a_gpu_says_what_it_is_built_for(monkeypatch, version):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", version)
    built = "torch is built for CUDA 13.0" if version else "torch is a CPU build"
    assert doctor.describe_gpu() == f"none found; {built}"


@pytest.mark.parametrize(("capability", "possible"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_a_gpu_is_named_with_what_it_can_do(monkeypatch, capability, possible):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (2**31, 2**32))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "GPU")
    assert doctor.describe_gpu() == "1 × GPU, compute capability {}.{}, 2 of 4 GiB free".format(*capability)
    assert doctor.describe_fp8().startswith("possible" if possible else "not possible")
