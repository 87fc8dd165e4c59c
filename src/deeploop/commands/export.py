"""`deeploop export`: its arguments; the package `export` does the work."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional


@dataclass(frozen=True, kw_only=True)
class ExportArgs:
    """Writes a run as a folder for transformers: AutoModelForCausalLM.from_pretrained(FOLDER)."""

    run: Positional[Path]
    """Run folder, as `deeploop train` writes it; `shipped` is the small model that comes with deeploop."""
    folder: Positional[Path]
    """Folder to write: a new one, an empty one, or an earlier export, which is replaced."""
    format: Literal["transformers", "nanbeige"] = "transformers"
    """nanbeige: for mlx-lm and llama.cpp, of rules without an outer norm (docs/serving.md)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the stored weights."""
    context: int | None = None
    """Longest sequence of the exported model; unset: as trained. A retrofit may have up to its source's."""
    cache_rounds: int | None = None
    """Rounds whose keys and values `generate` keeps, where loading names no other; unset: all."""


def run(args: ExportArgs) -> str:
    """Export the last checkpoint; return what to print."""
    from deeploop.export.nanbeige import export_nanbeige  # now: it waits for torch, --help does not
    from deeploop.export.run import export_run

    if args.format == "transformers":
        return export_run(
            args.run, args.folder, dtype=args.dtype, context=args.context, cache_rounds=args.cache_rounds
        )
    if args.cache_rounds is not None:
        raise ValueError(f"cache_rounds={args.cache_rounds}: must be unset with --format nanbeige")
    return export_nanbeige(args.run, args.folder, dtype=args.dtype, context=args.context)
