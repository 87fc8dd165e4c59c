"""A pretrained model on disk: a transformers folder (safetensors) or a GGUF file of the Llama family.

No code of it is executed. Names and shapes of all tensors are checked before memory is allocated; a tensor is
read on demand.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deeploop.data.gguf_file import GGUFFile
from deeploop.files import open_regular, read_object
from deeploop.models.gpt import Block, LoopedGPT
from deeploop.models.gpt_config import GPTConfig
from deeploop.retrofit.families import LAYER_NAMES, OUTER_NAMES, config_of_folder
from deeploop.retrofit.gguf_config import config_of_gguf

INDEX, WEIGHTS, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
LONGEST = 8192  # a config may ask for a rotary table of any length
PICKLED = ("*.bin", "*.pth", "*.pt", "*.ckpt")
FILE_NAME = re.compile(r"\w[\w.-]*\.safetensors")  # no separator
HEAD = "lm_head.weight"
UNUSED = re.compile(r".*rotary_emb\.inv_freq")  # a table in older folders


class Tensors(Protocol):
    """Tensors on disk, by their original names."""

    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str) -> Tensor:
        """Read one tensor, in its own dtype or as float32."""
        ...


@cache
def block_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a block's parameters."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in Block(config).state_dict().items()}


@dataclass(frozen=True)
class Source:
    """A pretrained model, whose layers are the blocks of `config` with R = 1."""

    path: Path
    family: str
    config: GPTConfig
    tensors: Tensors
    types: str
    """The data types of its tensors."""

    @property
    def is_gguf(self) -> bool:
        return isinstance(self.tensors, GGUFTensors)

    def layer(self, index: int) -> dict[str, Tensor]:
        """The tensors of a layer, by their names in a deeploop block."""
        return {ours: self._read(theirs) for ours, theirs in self._layer_names(index)}

    def outside(self) -> dict[str, Tensor]:
        """Embedding, final norm and head, by their names in LoopedGPT; vocabularies are padded with zeros."""
        found = {ours: self._read(theirs) for ours, theirs in self._outer_names()}
        self._check_tied(found["embedding.weight"])
        missing = self.config.padded_vocabulary - self.config.vocabulary
        for name in found.keys() & {"embedding.weight", "head.weight"}:
            found[name] = torch.nn.functional.pad(found[name], (0, 0, 0, missing))
        return found

    def _check_tied(self, embedding: Tensor) -> None:
        """Raise ValueError for a separate head despite tie_word_embeddings: transformers would use it."""
        has_own = self.config.tied_head and HEAD in self.tensors.shapes
        if has_own and not torch.equal(self._read(HEAD), embedding):
            raise ValueError(
                f"{self.path}: {HEAD} is not the embedding, although tie_word_embeddings is true; "
                "set it to false to use this head, or remove the tensor"
            )

    def check(self) -> None:
        """Raise ValueError unless exactly the expected tensors are there in their shapes."""
        wanted: dict[str, tuple[int, ...]] = {}
        block, width = block_shapes(self.config), self.config.width
        found = self.tensors.shapes
        for index in range(
            min(self.config.blocks, len(found) + 1)
        ):  # with more layers than that, some tensor is missing
            wanted |= {theirs: block[ours] for ours, theirs in self._layer_names(index)}
        table = (self.config.vocabulary, width)
        wanted |= {
            theirs: (width,) if ours == "final_norm.weight" else table for ours, theirs in self._outer_names()
        }
        for name in sorted(wanted.keys() | found.keys()):
            if name not in wanted and not UNUSED.fullmatch(name) and name != HEAD:
                raise ValueError(
                    f"{self.path}: tensor {name!r:.80}: a {self.family} model has none of that name"
                )
            if name in wanted and found.get(name) != wanted[name]:
                theirs = found.get(name, "absent")
                raise ValueError(f"{self.path}: tensor {name} is {theirs}: must be {wanted[name]}")

    def _layer_names(self, index: int) -> Iterable[tuple[str, str]]:
        for ours in block_shapes(self.config):
            module, _, attribute = ours.rpartition(".")
            yield ours, f"{LAYER_NAMES[module][self.is_gguf].format(index)}.{attribute}"

    def _outer_names(self) -> Iterable[tuple[str, str]]:
        for ours, theirs in OUTER_NAMES.items():
            if ours != "head" or not self.config.tied_head:
                yield f"{ours}.weight", f"{theirs[self.is_gguf]}.weight"

    def _read(self, name: str) -> Tensor:
        tensor = self.tensors.read(name)
        if not tensor.is_floating_point():
            raise ValueError(f"{self.path}: tensor {name} is of {tensor.dtype}: must be real numbers")
        wide = tensor.float()
        if not wide.isfinite().all():
            raise ValueError(f"{self.path}: tensor {name} holds numbers that are not finite")
        return wide


def open_source(path: Path) -> Source:
    """Open the model in a transformers folder or GGUF file, and check the names and shapes of its tensors."""
    if path.is_dir():
        source = _open_folder(path)
    elif path.is_file():
        file = GGUFFile(path)
        family, config = _named(path, config_of_gguf, file)
        types = ", ".join(f"{count} {name}" for name, count in file.types.items())
        source = Source(path, family, config, GGUFTensors(file, config, family), types)
    else:
        raise ValueError(f"{path}: no such transformers folder or GGUF file")
    source.check()
    return source


def _open_folder(folder: Path) -> Source:
    try:
        found = read_object(folder / CONFIG)
    except OSError as error:
        raise ValueError(f"{folder}: not a transformers folder ({CONFIG}: {error.strerror})") from None
    family, config = _named(folder / CONFIG, config_of_folder, found)
    tensors = FolderTensors(folder)
    return Source(folder, family, config, tensors, tensors.types)


def _named(path: Path, read, found) -> tuple[str, GPTConfig]:  # type: ignore[no-untyped-def]
    try:
        made: tuple[str, GPTConfig] = read(found)
        return made
    except ValueError as error:
        raise ValueError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None


class FolderTensors:
    """The safetensors of a folder, in one file or in those of an index; pickles are refused."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = self._listed()
        self.shapes, types = {}, set()
        for file in dict.fromkeys(self._files.values()):
            opened = self._open(file)
            for name in opened.keys():  # noqa: SIM118 (no dict)
                view = opened.get_slice(name)
                self.shapes[name] = tuple(view.get_shape())
                self._files[name] = file
                types.add(view.get_dtype())
        self.types = ", ".join(sorted(types))
        for name, file in self._files.items():
            if name and name not in self.shapes:
                raise ValueError(f"{folder / INDEX}: {name!r:.80} is not in {file}")

    def _listed(self) -> dict[str, str]:
        """Map tensors to their files; a single file is listed under an empty name."""
        if (self.folder / INDEX).exists():
            listed = read_object(self.folder / INDEX).get("weight_map")
            if not isinstance(listed, dict) or not listed:
                raise ValueError(f"{self.folder / INDEX}: has no weight_map")
            for file in listed.values():
                if not isinstance(file, str) or not FILE_NAME.fullmatch(file):
                    raise ValueError(
                        f"{self.folder / INDEX}: {file!r:.60}: must be a plain name of a .safetensors"
                    )
            return dict(listed)
        if (self.folder / WEIGHTS).exists():
            return {"": WEIGHTS}
        pickled = sorted(file.name for kind in PICKLED for file in self.folder.glob(kind))
        if pickled:
            raise ValueError(
                f"{self.folder / pickled[0]}: pickled weights, which can run code, are refused; "
                "save the model as safetensors"
            )
        raise ValueError(f"{self.folder}: holds no {WEIGHTS}")

    def _open(self, file: str):  # type: ignore[no-untyped-def]
        path = self.folder / file
        try:
            with open_regular(path):  # checks that it is a regular file
                return safe_open(path, framework="pt")
        except (OSError, SafetensorError, RuntimeError) as error:
            raise ValueError(f"{path}: can't be read ({error})") from None

    def read(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._open(self._files[name]).get_tensor(name)
            return tensor
        except (SafetensorError, KeyError, RuntimeError) as error:
            raise ValueError(f"{self.folder / self._files[name]}: {name}: can't be read ({error})") from None


class GGUFTensors:
    """The dequantized tensors of a GGUF file, with the rows of q and k in transformers' order."""

    def __init__(self, file: GGUFFile, config: GPTConfig, family: str) -> None:
        self._file = file
        self.shapes = file.shapes
        # llama.cpp stores Llama's rows for a rotary embedding of neighbouring pairs.
        self._interleaved = (
            {"attn_q": config.heads, "attn_k": config.grouped_heads} if family == "llama" else {}
        )

    def read(self, name: str) -> Tensor:
        values = torch.from_numpy(self._file.tensor(name))
        heads = self._interleaved.get(name.split(".")[-2])
        if heads is None:
            return values
        pairs = values.reshape(heads, -1, 2, *values.shape[1:])
        return pairs.transpose(1, 2).reshape(values.shape)


def load_source(source: Source) -> LoopedGPT:
    """Build the source itself in eval mode, with every layer once; for at most 8,192 tokens at a time."""
    weights = source.outside()
    for index in range(source.config.blocks):
        weights |= {f"blocks.{index}.{name}": tensor for name, tensor in source.layer(index).items()}
    model = LoopedGPT(replace(source.config, context=min(source.config.context, LONGEST)))
    model.load_state_dict(weights)
    return model.eval()
