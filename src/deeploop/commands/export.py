"""`deeploop export`: its arguments; `export_run.py` does the work."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from deeploop.commands.parsing import run_command


@dataclass(frozen=True, kw_only=True)
class ExportArgs:
    """Writes a run as a folder for transformers: AutoModelForCausalLM.from_pretrained(FOLDER)."""

    run: Positional[Path]
    """Run folder, as `deeploop train` writes it; `shipped` is the small model that comes with deeploop."""
    folder: Positional[Path]
    """Folder to write: a new one, an empty one, or an earlier export, which is replaced."""
    format: Literal["transformers", "nanbeige"] = "transformers"
    """nanbeige: for mlx-lm and llama.cpp, of rules without an outer norm (docs/inference.md says which)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the stored weights."""
    context: int | None = None
    """Longest sequence of the exported model; unset: as trained. A retrofit may have up to its source's."""
    cache_rounds: int | None = None
    """Rounds whose keys and values `generate` keeps, where loading names no other; unset: all."""


def run(args: ExportArgs) -> str:
    """Exports the last checkpoint; returns what to print."""
    if args.format == "nanbeige":
        from deeploop.commands import export_nanbeige  # now: it waits for torch, --help does not

        return export_nanbeige.run(args)
    from deeploop.commands import export_run

    return export_run.run(args)


def main(arguments: list[str]) -> int:
    words = {"rounds": "rounds=… in from_pretrained, one export serves all"}
    return run_command(ExportArgs, run, arguments, prog="deeploop export", words=words)
