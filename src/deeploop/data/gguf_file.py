"""GGUF files of others, through the package `gguf`: metadata and tensors, one line where they fail."""

from pathlib import Path
from typing import Any

import numpy as np

from deeploop.extras import require
from deeploop.files import open_regular

DAMAGED = (
    ValueError,
    IndexError,
    KeyError,
    TypeError,
    OverflowError,
    UnicodeDecodeError,
    MemoryError,
    OSError,
)


class GGUFFile:
    """The metadata of a GGUF file, and its tensors, each read from the disk when it is asked for."""

    def __init__(self, path: Path) -> None:
        gguf = require("gguf", "gguf", str(path))
        self.path = path
        try:
            with open_regular(path) as file:
                magic = file.read(4)
        except OSError as error:
            raise ValueError(f"{path}: can't be read ({error.strerror})") from None
        if magic != b"GGUF":
            raise ValueError(f"{path}: not a GGUF file (it begins with {magic!r})")
        try:
            reader = gguf.GGUFReader(path)
            self._fields = dict(reader.fields)
            self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        except DAMAGED as error:
            raise ValueError(f"{path}: damaged GGUF file ({error!r:.100})") from None

    def get(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The metadata of that name, which must be of the kind; without a default it must be there."""
        if name not in self._fields:
            if default is None:
                raise ValueError(f"{self.path}: its metadata has no {name}")
            return default
        try:
            value = self._fields[name].contents()
        except DAMAGED as error:
            raise ValueError(f"{self.path}: {name}: damaged metadata ({error!r:.100})") from None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise ValueError(f"{self.path}: {name}={value!r:.40}: not of the kind that is expected")
        return value

    def has(self, name: str) -> bool:
        return name in self._fields

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, in torch's order."""
        return {name: tuple(map(int, reversed(t.shape))) for name, t in self._tensors.items()}

    @property
    def types(self) -> dict[str, int]:
        """How many tensors there are of each type."""
        names = [tensor.tensor_type.name for tensor in self._tensors.values()]
        return {name: names.count(name) for name in dict.fromkeys(names)}

    def tensor(self, name: str) -> np.ndarray:
        """A tensor, dequantized to float32."""
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise ValueError(
                f"{self.path}: {name} is of type {tensor.tensor_type.name}, which gguf can't dequantize; "
                "take a file with F16, Q8_0, Q4_1 or a K type, or the transformers folder"
            ) from None
        except DAMAGED as error:
            raise ValueError(f"{self.path}: {name}: damaged tensor ({error!r:.100})") from None
        return np.array(values.reshape(self.shapes[name]), dtype=np.float32)  # not of the file's map
