"""The folder of an export: an earlier export is replaced as a whole, and nothing else is touched."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deeploop.files import exclusive_folder, new_folder, publish, read_json

PART = ".deeploop-export.part"  # a name used for nothing else, so its content may be deleted
# Files that `from_pretrained` loads or runs if they exist; those of an earlier export are removed.
LOADED = (
    *("model*.safetensors", "model.safetensors.index.json", "generation_config.json", "deeploop_*.py"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.*", "additional_chat_templates"),
)
CARD_MARK = "A looped language model: K stored blocks applied for R rounds"  # in every model card of deeploop


@contextmanager
def new_export(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to write to; its files then replace those of an earlier export."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"folder={folder}: is a file; name a folder")
    with exclusive_folder(folder, "folder"):
        part = _open_part(folder)
        yield part
        _replace(part, folder)


def written(folder: Path, run: Path, checkpoint: Path) -> str:
    """Summarize what was exported, with a note on a README.md that was kept."""
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    card = folder / "README.md"
    kept = "" if _is_our_card(card) else f"; {card} is not of an export, and stays"
    return f"written: {folder} ({size / 1e6:.1f} MB) of {run} at {checkpoint.name}{kept}"


def _open_part(folder: Path) -> Path:
    """Make an empty folder inside `folder`, which must be empty or hold an earlier export."""
    part = folder / PART
    config = read_json(folder / "config.json")
    known = config.get("model_type") == "deeploop" or "exported_by" in config
    ours = known or (part.is_dir() and not part.is_symlink())
    if not ours and any(file.name != ".lock" for file in folder.iterdir()):
        raise ValueError(f"folder={folder}: is not empty and not an earlier export; name another folder")
    return new_folder(part)


def _is_our_card(card: Path) -> bool:
    return card.is_file() and CARD_MARK in card.read_text(encoding="utf-8", errors="replace")


def _replace(part: Path, folder: Path) -> None:
    """Move the files of a complete export into place, config.json last: without it nothing is loaded.

    A README.md that is not of an export is kept.
    """
    card = folder / "README.md"
    if card.exists() and not _is_our_card(card):
        (part / "README.md").unlink()
    (folder / "config.json").unlink(missing_ok=True)
    for path in [path for pattern in LOADED for path in folder.glob(pattern)]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    for file in part.iterdir():
        file.chmod(0o644)  # safetensors leaves 0600
    publish(part, folder, last="config.json")
