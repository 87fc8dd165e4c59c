"""`deeploop doctor`: what is installed, what training would use, and a self-test of a few seconds."""

import contextlib
import io
import platform
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import islice
from pathlib import Path

import deeploop
from deeploop.data.corpora import stdlib
from deeploop.data.prepare import prepare
from deeploop.data.tokenizers import get_tokenizer
from deeploop.extras import how_to_install
from deeploop.tasks.language.config import TrainConfig
from deeploop.tasks.language.recipes import tiny
from deeploop.terminal import loading_torch
from deeploop.train.metrics import read_metrics

# What needs torch is imported where it is used: the first lines and --help do not wait for it.
STEPS = 20
EXTRA = re.compile(r"""([\w.-]+).*;.*extra == ['"](\w+)['"]""")


@dataclass(frozen=True)
class DoctorArgs:
    """Show what is installed and what training would use, then train a tiny model for a few steps."""


def extras() -> dict[str, list[str]]:
    """Return the optional packages of each extra, as the installed deeploop names them."""
    found: dict[str, list[str]] = {}
    if version_of("deeploop") is None:  # run from its sources
        return found
    for requirement in metadata.requires("deeploop") or []:
        named = EXTRA.match(requirement)
        if named and named[2] != "dev":
            found.setdefault(named[2], []).append(named[1])
    return found


def version_of(package: str) -> str | None:
    """Return the installed version, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def describe_extra(extra: str, packages: list[str]) -> str:
    versions = {package: version_of(package) for package in packages}
    if all(versions.values()):
        return ", ".join(f"{package} {version}" for package, version in versions.items())
    missing = ", ".join(package for package, version in versions.items() if not version)
    return f"{missing} not installed; {how_to_install(extra)}"


def describe_gpu() -> str:
    import torch

    from deeploop.train.device import device_name

    if not torch.cuda.is_available():
        built = (
            f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is a CPU build"
        )
        return f"none found; {built}"
    free, total = torch.cuda.mem_get_info()
    count = torch.cuda.device_count()
    major, minor = torch.cuda.get_device_capability()
    return (
        f"{count} × {device_name(torch.device('cuda'))}, compute capability {major}.{minor}, "
        f"{free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
    )


def describe_fp8() -> str:
    import torch

    from deeploop.train.execution import FP8_CAPABILITY

    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= FP8_CAPABILITY:
        return "possible with --device.precision fp8, where the Triton kernels run"
    return "not possible; it needs a GPU of compute capability {}.{} or more".format(*FP8_CAPABILITY)


def installed() -> Iterator[tuple[str, str]]:
    """List what is installed: a name and its description per line."""
    yield "deeploop", f"{deeploop.__version__} in {Path(deeploop.__file__).parent}"
    yield "Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    for extra, packages in sorted(extras().items()):
        yield f"extra {extra}", describe_extra(extra, packages)
    yield "Triton", version_of("triton") or "not installed; only a GPU needs it"
    with loading_torch():
        import torch

        from deeploop.train.device import cpu_threads

    yield "torch", f"{torch.__version__}, {cpu_threads()}"
    yield "GPU", describe_gpu()


def small_config(folder: Path) -> TrainConfig:
    """The recipe `tiny`, cut to a few small steps, on a few files of the standard library."""
    base, corpus = tiny(), folder / "corpus"
    prepare(
        list(islice(stdlib(), 20)),
        get_tokenizer("bytes"),
        corpus,
        validation_tokens=10_000,
        source="self-test",
    )
    return replace(
        base,
        out=folder / "run",
        model=replace(base.model, context=64),
        data=replace(base.data, path=corpus, validation_sequences=8, validate_every=STEPS),
        optim=replace(base.optim, steps=STEPS, warmup_steps=STEPS, batch=4),
        checkpoint=replace(base.checkpoint, every=STEPS),
    )


def describe_execution(config: TrainConfig) -> str:
    """Describe how a step would be executed on this machine."""
    from deeploop.tasks.language.task import LanguageTask
    from deeploop.train.distributed import open_world
    from deeploop.train.execution import choose_execution

    with open_world(config.device) as world:
        task = LanguageTask(config, world)
        model = task.build().to(world.device)
        optimizer = task.make_optimizer(model)
        chosen = choose_execution(config.device, world, model, optimizer, task.capabilities)
        return f"{chosen.describe()}, on {world.device.type}"


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread: so small a model gains nothing from more, and on busy cores threads wait for each
    other.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def self_test(config: TrainConfig) -> str:
    """Train, save, load and generate; describe the outcome in one line."""
    from deeploop.eval.generation import generate_text
    from deeploop.train.loop import train
    from deeploop.train.rundir import load

    started = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        train(config)
    first, *_, last = (record["loss"] for record in read_metrics(config.out, "validation"))
    text = generate_text(*load(config.out), "def ", max_tokens=20, temperature=0)
    seconds = time.perf_counter() - started
    if not last < first:
        raise ValueError(f"self-test: after {STEPS} steps the loss is {last:.3f}, it started at {first:.3f}")
    return f"in {seconds:.1f} s: loss {first:.3f} → {last:.3f}, {len(text)} characters of text"


def run(args: DoctorArgs) -> int:
    """Print each line as soon as its content is known."""
    for name, description in installed():
        print(f"{name:<18}{description}", flush=True)
    with tempfile.TemporaryDirectory() as folder, one_thread():
        config = small_config(Path(folder))
        print(f"{'training uses':<18}{describe_execution(config)}", flush=True)
        print(f"{'FP8':<18}{describe_fp8()}", flush=True)
        print(
            f"{'self-test':<18}{STEPS} steps of a tiny model; it is saved, loaded and asked for text",
            flush=True,
        )
        print(f"{'passed':<18}{self_test(config)}")
    return 0
