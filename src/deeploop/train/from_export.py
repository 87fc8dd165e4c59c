"""Read the config and the weights of an exported folder (`deeploop export`)."""

from dataclasses import fields
from pathlib import Path

from torch import nn

from deeploop.config.json import from_dict
from deeploop.config.old_names import model_section
from deeploop.data.bpe import find_tokenizer
from deeploop.data.pretrained_tokenizer import PretrainedTokenizer
from deeploop.data.tokenizers import Tokenizer
from deeploop.files import read_object
from deeploop.models.accounting import parameter_count
from deeploop.models.exit_gate import GATE
from deeploop.models.gpt_config import GPTConfig
from deeploop.runs.folder import WEIGHTS
from deeploop.train.checkpoint import load_weights


def read_export(folder: Path) -> GPTConfig:
    """Read the config of an export; refuse one that its file of weights is too small for."""
    path = folder / "config.json"
    exported = model_section(read_object(path))
    own = {field.name: exported[field.name] for field in fields(GPTConfig) if field.name in exported}
    config: GPTConfig = from_dict(GPTConfig, own | {"rounds": exported.get("trained_rounds")}, str(path))
    try:
        size = (folder / WEIGHTS).stat().st_size
    except OSError as error:
        raise ValueError(f"{folder / WEIGHTS}: can't be read ({error.strerror})") from None
    padding = (config.padded_vocabulary - config.vocabulary) * (2 * config.width + 1)
    if 2 * (parameter_count(config) - padding) > size:  # in bfloat16; a resized vocabulary has no padding
        raise ValueError(f"{folder / WEIGHTS}: {size:,} bytes are too few for the model of {path}")
    return config


def load_export(model: nn.Module, folder: Path, tokenizer: Tokenizer | None) -> None:
    """Load exported weights into `model`; raise if their tokenizer differs."""
    words = read_export(folder).vocabulary
    if tokenizer is not None and not _reads(folder, tokenizer):
        raise ValueError(
            f"init_from={folder}: reads other tokens than {tokenizer.name}; prepare the data with "
            f"--tokenizer {folder}"
        )
    load_weights(model, folder, prefix="model.", may_lack=GATE, words=words)


def _reads(folder: Path, tokenizer: Tokenizer) -> bool:
    """Return True if the export's tokenizer gives the same ids; deeploop's own export has only the merges."""
    theirs = find_tokenizer(str(folder))
    if isinstance(tokenizer, PretrainedTokenizer):
        return isinstance(theirs, PretrainedTokenizer) and theirs.reads_as(tokenizer)
    model = read_object(folder / "tokenizer.json").get("model")
    merges = model.get("merges") if isinstance(model, dict) else None
    if not isinstance(merges, list):
        return False
    return [tuple(pair) if isinstance(pair, list) else pair for pair in merges] == list(tokenizer.merges)
