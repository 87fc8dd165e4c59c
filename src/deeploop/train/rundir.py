"""The run folder: everything a run is, in files that outlive the process.

run.json        format version, deeploop, torch and git versions, the command, the task and what it reads,
                how steps are executed, and how the run ended
config.json     the full config
merges.txt      the tokenizer, where it was trained on the corpus; tokenizer.json of a pretrained one
template.jinja  the chat template of a run on conversations
metrics.jsonl   one JSON object per line; metrics.previous.jsonl of a start that left no checkpoint
checkpoints/    step-00001000/{model,optimizer,rng}.safetensors, state.json; task.safetensors of a reasoner

What commands add later is in docs/run-folder.md.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deeploop.config.run import RunConfig
from deeploop.data.bpe import how_to_ask, load_tokenizer
from deeploop.data.tokenizers import Tokenizer
from deeploop.files import (
    exclusive_folder,
    new_folder,
    publish,
    resolve,
    unused_path,
    write_json,
    write_text,
)
from deeploop.models.accounting import parameter_count
from deeploop.models.gpt import LoopedGPT
from deeploop.models.gpt_config import GPTConfig
from deeploop.runs.folder import (
    FORMAT,
    WEIGHTS,
    load_config,
    provenance,
    require_checkpoint,
    tokenizer_name,
    write_config,
)
from deeploop.train.checkpoint import load_weights, read_whole_state

PART = ".deeploop-run.part"  # a name used for nothing else


def create_run(config: RunConfig, stamp: dict[str, Any], files: dict[str, str]) -> None:
    """Write the files that are known before the first step, including the task's own `files`."""
    folder = config.out
    made = provenance() | {"torch": torch.__version__}  # package metadata lack the CUDA build
    try:
        for name, text in files.items():
            write_text(folder / name, text)
        write_json(folder / "run.json", {"format": FORMAT, **stamp, **hardware(config), **made})
        write_config(config)
        # Files that an earlier run left without a checkpoint are moved aside, not lost.
        if (metrics := folder / "metrics.jsonl").exists():
            metrics.replace(unused_path(folder / "metrics.previous.jsonl"))
    except OSError as error:
        raise ValueError(f"out={folder}: can't be written ({error.strerror})") from None


@contextmanager
def new_run(out: Path) -> Iterator[Path]:
    """Yield an empty folder inside `out`, whose files are moved into `out` once all of them are written.

    `out` must be empty, except for what a killed command left.
    """
    with exclusive_folder(out, "out"):
        part = out / PART
        was_killed = part.is_dir() and not part.is_symlink() and not (out / "run.json").exists()
        if not was_killed and any(file.name != ".lock" for file in out.iterdir()):
            raise ValueError(f"out={out}: is not empty; name another folder")
        yield new_folder(part)
        publish(part, out, last="run.json")


def hardware(config: RunConfig) -> dict[str, Any]:
    """Return the device and the number of ranks."""
    gpu = config.device.kind != "cpu" and torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if gpu else "cpu",
        "ranks": torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
    }


def load(
    run: str | Path, *, device: str | torch.device = "cpu", checkpoint: Path | None = None
) -> tuple[LoopedGPT, Tokenizer]:
    """Load the model (in eval mode, weights verified) and the tokenizer of a run folder.

    The weights are those of `checkpoint`, by default the last one. Pass it if you report which weights were
    read, because a run that is still training saves new ones meanwhile.
    """
    run = Path(run)
    model = load_model(run, device=device, checkpoint=checkpoint)
    return model, load_tokenizer(tokenizer_name(run), resolve(run))


def load_last(model: nn.Module, run: str | Path) -> None:
    """Load the verified weights of a run's last checkpoint into a model of its kind."""
    checkpoint = require_checkpoint(Path(run))
    read_whole_state(checkpoint, [WEIGHTS])
    load_weights(model, checkpoint)


def load_model(run: Path, *, device: str | torch.device = "cpu", checkpoint: Path | None = None) -> LoopedGPT:
    """Load the model without its tokenizer."""
    return load_gpt(run, load_config(run).model, device, checkpoint)


def load_gpt(run: Path, config: GPTConfig, device: str | torch.device, checkpoint: Path | None) -> LoopedGPT:
    """Load a looped GPT with the verified weights of a checkpoint, by default the last one."""
    checkpoint = checkpoint or require_checkpoint(run)
    read_whole_state(checkpoint, [WEIGHTS])
    check_size(checkpoint, parameter_count(config), config.context * config.head_size)
    model = LoopedGPT(config)
    load_weights(model, checkpoint)
    return model.to(device).eval()


def check_size(checkpoint: Path, weights: int, table: int) -> None:
    """Raise if a config describes a larger model than its file of weights can fill.

    `weights` and `table` are numbers of fp32 values: at least those of the model, and of its rotary table.
    """
    path = checkpoint / WEIGHTS
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ValueError(f"{path}: can't be read ({error.strerror})") from None
    if 4 * weights > size or table > max(size, 2**28):
        raise ValueError(
            f"{path}: {size:,} bytes, but the run describes a model of {4 * weights:,} bytes of weights "
            f"and a table of {4 * table:,}"
        )


def check_tokenizer(data: Path, name: str, tokenizer: Tokenizer, run: Path) -> None:
    """Raise if the data have another tokenizer than the run; a trained one has its hash in its name."""
    if name != tokenizer.name:
        raise ValueError(
            f"data={data}: holds {name} tokens, the run was trained on {tokenizer.name}; "
            f"prepare it with --tokenizer {how_to_ask(tokenizer.name, run)}"
        )
