"""Bytes of a safetensors header -> `Header`. Pure, bounded, no input or output.

Receives raw bytes that nobody vouches for. Everything that is not exactly what the format says is a `CheckpointError`
that names the file: duplicate keys, holes, overlaps, wrong sizes, trailing bytes, and counts and sizes beyond the caps,
which are refused before they cost time or memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Final

from safeload.errors import CheckpointError
from safeload.indexes import MAX_TENSORS, describe_junk, is_text, parse_json

__all__ = [
    "DTYPE_BITS",
    "MAX_HEADER_BYTES",
    "Header",
    "HeaderWatch",
    "TensorEntry",
    "parse_header",
    "parse_header_size",
]

MAX_HEADER_BYTES: Final = 25 * 1000**2  # 0.1 KB a tensor: a hundred times the largest header of a published tower

DTYPE_BITS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "BOOL": 8,
        "F4": 4,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
        "U8": 8,
        "I8": 8,
        "F8_E5M2": 8,
        "F8_E4M3": 8,
        "F8_E5M2FNUZ": 8,
        "F8_E4M3FNUZ": 8,
        "F8_E8M0": 8,
        "I16": 16,
        "U16": 16,
        "F16": 16,
        "BF16": 16,
        "I32": 32,
        "U32": 32,
        "F32": 32,
        "C64": 64,
        "F64": 64,
        "I64": 64,
        "U64": 64,
    }
)

_AGAIN: Final = " Download it again."
_LENGTH_BYTES: Final = 8
_SNIFFED_BYTES: Final = 512  # enough to tell what was put in place of weights
_MAX_DIMENSIONS: Final = 64
_TENSOR_KEYS: Final = frozenset({"dtype", "shape", "data_offsets"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor as a safetensors header states it; `begin` and `end` are bytes from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size_bytes(self) -> int:
        """The bytes the tensor takes in the file."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A whole safetensors header: `tensors` in the order of their bytes, `metadata` as written, and sizes."""

    path: str
    tensors: tuple[TensorEntry, ...]
    metadata: Mapping[str, str]
    header_bytes: int
    size_bytes: int


def parse_header_size(start: bytes, *, path: str, size_bytes: int) -> int:
    """Read how long the header of a safetensors file is, and check it against the file and the cap.

    Args:
        start: The first bytes of the file, 8 at least where it has them; 512 help to recognise what it is instead.
        path: The file's name, for messages.
        size_bytes: The size of the whole file.

    Returns:
        The length in bytes of the JSON that follows the first 8 bytes.

    Raises:
        CheckpointError: Empty, truncated, not a safetensors file, or the header is beyond the cap.
    """
    junk = describe_junk(start)
    if junk:
        raise CheckpointError(f"{path}: this is {junk}.", path=path)
    if size_bytes < _LENGTH_BYTES or len(start) < _LENGTH_BYTES:
        what = "is empty" if size_bytes == 0 else f"has {size_bytes} bytes and is truncated"
        raise CheckpointError(f"{path} {what}: a safetensors file begins with 8 bytes of length.{_AGAIN}", path=path)
    length = int.from_bytes(start[:_LENGTH_BYTES], "little")
    if length > size_bytes - _LENGTH_BYTES:
        raise CheckpointError(
            f"{path}: truncated, or not a safetensors file: the header says it has {length} bytes, the file has "
            f"{size_bytes} in all.{_AGAIN}",
            path=path,
        )
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: a header of {length} bytes; at most {MAX_HEADER_BYTES} are read.", path=path)
    if length < len(b"{}"):
        raise CheckpointError(f"{path}: a header of {length} bytes cannot be one; expected a JSON object.", path=path)
    return length


def parse_header(raw: bytes, *, path: str, size_bytes: int) -> Header:
    """Parse and check the header of a safetensors file.

    Args:
        raw: The JSON of the header, without the 8 bytes of length before it.
        path: The file's name, for messages.
        size_bytes: The size of the whole file.

    Returns:
        The header; its tensors cover the data exactly, without hole, overlap or trailing bytes.

    Raises:
        CheckpointError: Whatever the format does not allow, all of it before any tensor is touched.
    """
    tensors, metadata = _parse_entries(raw, path=path)
    _check_end(tensors, path=path, data_bytes=size_bytes - _LENGTH_BYTES - len(raw))
    return _header(tensors, metadata, raw, path=path, size_bytes=size_bytes)


def _parse_entries(raw: bytes, *, path: str) -> tuple[list[TensorEntry], dict[str, str]]:
    if not raw.startswith(b"{"):
        raise CheckpointError(f"{path}: the header does not begin with '{{'; not a safetensors file.", path=path)
    if raw.count(b'"dtype"') <= MAX_TENSORS:  # counted first: a million entries take seconds to parse
        value = parse_json(raw, path=f"{path} (header)")
        metadata = value.pop("__metadata__", {})
        texts = [*metadata, *metadata.values()] if isinstance(metadata, dict) else [None]
        if not all(isinstance(text, str) and is_text(text) for text in texts):
            raise CheckpointError(f"{path}: __metadata__ is not an object of text to text.", path=path)
        if len(value) <= MAX_TENSORS:
            entries = (_entry(name, entry, path) for name, entry in value.items())
            return sorted(entries, key=lambda tensor: (tensor.begin, tensor.end)), metadata
    raise CheckpointError(f"{path}: the header has more than {MAX_TENSORS} tensors.", path=path)


def _header(tensors: list[TensorEntry], metadata: dict[str, str], raw: bytes, *, path: str, size_bytes: int) -> Header:
    position = 0
    for tensor in tensors:
        if tensor.begin != position:
            what = "a hole before" if tensor.begin > position else "an overlap with"
            raise CheckpointError(f"{path}: {what} tensor {tensor.name!r:.300} in the data.", path=path)
        position = tensor.end
    return Header(
        path=path,
        tensors=tuple(tensors),
        metadata=MappingProxyType(metadata),
        header_bytes=len(raw),
        size_bytes=size_bytes,
    )


class HeaderWatch:
    """Parses the header of a safetensors file from the very chunks that are hashed and copied.

    A file that is cut short, or made endless, is refused before the rest of it is read. All other faults are kept for
    `result`: bytes that are not the expected ones are an integrity failure first, a malformed file second.
    """

    def __init__(self, *, path: str, size_bytes: int) -> None:
        """Watch the file of this name and size."""
        self._path, self._size_bytes = path, size_bytes
        self._start = bytearray()
        self._wanted_bytes = min(_SNIFFED_BYTES, size_bytes)
        self._is_sized = False
        self._result: Header | CheckpointError | None = None

    def add(self, chunk: memoryview) -> None:
        """Take the next bytes of the file.

        Args:
            chunk: They are copied only as far as the header goes.

        Raises:
            CheckpointError: The file is shorter or longer than its header says, or is something else altogether.
        """
        if self._result is not None:
            return
        wanted = self._take(chunk)
        if not self._is_sized and len(self._start) == self._wanted_bytes:
            length = parse_header_size(bytes(self._start), path=self._path, size_bytes=self._size_bytes)
            self._wanted_bytes, self._is_sized = _LENGTH_BYTES + length, True
            self._take(chunk[wanted:])
        if self._is_sized and len(self._start) >= self._wanted_bytes:
            self._parse()

    def _take(self, chunk: memoryview) -> int:
        wanted = max(0, self._wanted_bytes - len(self._start))
        self._start += chunk[:wanted]
        return wanted

    def _parse(self) -> None:
        raw = bytes(self._start[_LENGTH_BYTES : self._wanted_bytes])
        try:
            tensors, metadata = _parse_entries(raw, path=self._path)
        except CheckpointError as error:
            self._result = error
            return
        _check_end(tensors, path=self._path, data_bytes=self._size_bytes - self._wanted_bytes)
        try:
            self._result = _header(tensors, metadata, raw, path=self._path, size_bytes=self._size_bytes)
        except CheckpointError as error:
            self._result = error

    def result(self) -> Header | CheckpointError:
        """Return the header, or what is wrong with it, once the whole file was added.

        Returns:
            The error, not raised, so that the digests can be looked at first.
        """
        if self._result is None:
            what = f"{self._path}: {self._size_bytes} bytes, empty or truncated.{_AGAIN}"
            return CheckpointError(what, path=self._path)
        return self._result


def _entry(name: str, entry: object, path: str) -> TensorEntry:
    if not isinstance(entry, dict) or set(entry) != _TENSOR_KEYS or not is_text(name):
        raise CheckpointError(
            f"{path}: tensor {name!r:.300}: expected dtype, shape and data_offsets, got {entry!r:.200}.", path=path
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(f"{path}: tensor {name!r:.300}: unknown dtype {dtype!r:.50}.", path=path)
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS or not _are_sizes(offsets) or len(offsets) != 2:  # noqa: PLR2004
        raise CheckpointError(f"{path}: tensor {name!r:.300}: bad shape or data_offsets in {entry!r:.200}.", path=path)
    bits = prod(shape) * DTYPE_BITS[dtype]
    begin, end = offsets
    if bits % 8 or end - begin != bits // 8:
        raise CheckpointError(
            f"{path}: tensor {name!r:.300}: {dtype} of shape {shape} needs {bits / 8:g} bytes, "
            f"data_offsets give {end - begin}.",
            path=path,
        )
    return TensorEntry(name=name, dtype=dtype, shape=tuple(shape), begin=begin, end=end)


def _check_end(tensors: list[TensorEntry], *, path: str, data_bytes: int) -> None:
    end = max((tensor.end for tensor in tensors), default=0)
    if end != data_bytes:
        what = "truncated" if end > data_bytes else "trailing bytes after the last tensor"
        raise CheckpointError(
            f"{path}: {what}: the header describes {end} bytes of data, the file has {data_bytes}.{_AGAIN}", path=path
        )


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)
