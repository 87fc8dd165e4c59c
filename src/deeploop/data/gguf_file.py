"""Read GGUF files from untrusted sources through the package `gguf`."""

import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from deeploop.extras import require
from deeploop.files import open_regular

VERSIONS = (2, 3)
# Size in bytes of a metadata value by type; strings and arrays store their own.
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9
# Far above what real models have; they bound the time and memory that an untrusted file can take.
MOST_NAMES, MOST_ITEMS, MOST_DIMENSIONS, LONGEST_SIDE = 2**16, 2**22, 4, 2**31
# What `gguf` raises on a damaged file.
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


class _Checker:
    """Check that the counts in header, metadata and tensor list fit into the file.

    The package `gguf` trusts these counts; in a damaged file they can make it loop past the end forever.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._left = os.fstat(file.fileno()).st_size

    def check(self) -> None:
        magic = self._bytes(min(4, self._left))
        if magic != b"GGUF":
            raise ValueError(f"not a GGUF file (it begins with {magic!r})")
        if (version := self._number(4)) not in VERSIONS:
            raise ValueError(f"GGUF version {version}: must be {' or '.join(map(str, VERSIONS))}")
        tensors, fields = (self._number(8, MOST_NAMES) for _ in range(2))
        for _ in range(fields):
            self._string()
            self._value(self._number(4))
        for _ in range(tensors):
            self._string()
            for _ in range(self._number(4, MOST_DIMENSIONS)):
                self._number(8, LONGEST_SIDE)
            self._bytes(12)  # type (4) and offset (8)

    def _value(self, kind: int) -> None:
        if kind == STRING:
            self._string()
        elif kind == ARRAY:
            inner, count = self._number(4), self._number(8, MOST_ITEMS)
            if inner == STRING:
                for _ in range(count):
                    self._string()
            else:
                self._bytes(count * self._size(inner))
        else:
            self._bytes(self._size(kind))

    def _size(self, kind: int) -> int:
        if kind not in SIZES:
            raise ValueError(f"damaged GGUF file (metadata of type {kind})")
        return SIZES[kind]

    def _string(self) -> None:
        self._bytes(self._number(8))

    def _number(self, size: int, most: int | None = None) -> int:
        count = int.from_bytes(self._bytes(size), "little")
        if most is not None and count > most:
            raise ValueError(f"damaged GGUF file (a count of {count}: must be at most {most})")
        return count

    def _bytes(self, count: int) -> bytes:
        if count > self._left:
            raise ValueError("damaged GGUF file (truncated: it lists more bytes than it has)")
        self._left -= count
        return self._file.read(count)


class GGUFFile:
    """The metadata of a GGUF file, and its tensors, which are read on demand."""

    def __init__(self, path: Path) -> None:
        gguf = require("gguf", "gguf", str(path))
        self.path = path
        try:
            with open_regular(path) as file:
                _Checker(file).check()
        except OSError as error:
            raise ValueError(f"{path}: can't be read ({error.strerror})") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        try:
            reader = gguf.GGUFReader(path)
            self._fields = dict(reader.fields)
            self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        except DAMAGED as error:
            raise ValueError(f"{path}: damaged GGUF file ({error!r:.100})") from None

    def get(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return a metadata value of the given type, or the default if it is missing.

        Raises ValueError if there is no default either, or if the value has another type.
        """
        if name not in self._fields:
            if default is None:
                raise ValueError(f"{self.path}: its metadata has no {name}")
            return default
        try:
            value = self._fields[name].contents()
        except DAMAGED as error:
            raise ValueError(f"{self.path}: {name}: damaged metadata ({error!r:.100})") from None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise ValueError(f"{self.path}: {name}={value!r:.40}: has an unexpected type")
        return value

    @property
    def names(self) -> list[str]:
        """The names of all metadata values."""
        return list(self._fields)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, in torch's order."""
        return {name: tuple(map(int, reversed(t.shape))) for name, t in self._tensors.items()}

    @property
    def types(self) -> dict[str, int]:
        """The number of tensors of each type."""
        names = [tensor.tensor_type.name for tensor in self._tensors.values()]
        return {name: names.count(name) for name in dict.fromkeys(names)}

    def tensor(self, name: str) -> np.ndarray:
        """Read a tensor, dequantized to float32."""
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        try:
            with np.errstate(all="ignore"):  # the caller refuses non-finite values
                values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise ValueError(
                f"{self.path}: {name} is of type {tensor.tensor_type.name}, which gguf can't dequantize; "
                "use a file in F16, Q8_0, Q4_1 or a K-quant type, or the transformers folder"
            ) from None
        except DAMAGED as error:
            raise ValueError(f"{self.path}: {name}: damaged tensor ({error!r:.100})") from None
        return np.array(values.reshape(self.shapes[name]), dtype=np.float32)  # a copy, not a view of the file
