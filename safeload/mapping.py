"""Memory of a node that several processes map: private mappings of it, and what of it has been looked at.

Receives descriptors of files or sealed memory. Gives mappings that share the pages of all processes until somebody
writes: what is written stays in the process that wrote (MAP_PRIVATE). Linux only; `can_map` says whether it is.
"""

from __future__ import annotations

import bisect
import mmap
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from safeload.errors import SourceError
from safeload.holding import freeze, has_sealed_memory, new_memory, write_at
from safeload.paging import Backed, Window

__all__ = ["ALIGN_BYTES", "WINDOW_BYTES", "Arena", "Mapped", "can_map", "map_private", "mapped_now", "view"]

WINDOW_BYTES: Final = 1 << 16  # what the kernel enters into the page table around a page that is read
_ARENA: Final = Path("the tower's own tensors")
ALIGN_BYTES: Final = 64  # a cache line, and as torch's own allocator aligns
_PRESENT: Final = 0b11  # top bits of an entry of /proc/self/pagemap: present, swapped
_ENTRY_BYTES: Final = 8


def can_map() -> bool:
    """Say whether memory can be sealed, shared and looked at on this system."""
    return sys.platform == "linux" and has_sealed_memory() and os.path.exists("/proc/self/pagemap")


def map_private(fd: int, size_bytes: int) -> torch.UntypedStorage:
    """Map a file or memory: its pages are shared with every other mapping until this process writes to one.

    Args:
        fd: Of the file or memory; may be closed afterwards, and may be read-only.
        size_bytes: How much of it, from its beginning.

    Returns:
        The mapping, which holds no descriptor. Tensors made by `view` keep it alive.

    Raises:
        SourceError: The file is shorter than it was.
    """
    now_bytes = os.fstat(fd).st_size
    if now_bytes < size_bytes:
        raise SourceError(
            f"{os.readlink(f'/proc/self/fd/{fd}')}: {now_bytes} bytes now, {size_bytes} when it was opened: something "
            "writes to it, and memory='mapped' is for storage that nobody writes to."
        )
    return _map(fd, size_bytes, shared=False)


def _map(fd: int, size_bytes: int, *, shared: bool) -> torch.UntypedStorage:
    try:
        window = Window(fd, size_bytes, shared=shared)
    except OSError as error:
        raise MemoryError(f"{size_bytes} bytes cannot be mapped: {error.strerror}") from error
    return torch.frombuffer(window.buffer, dtype=torch.uint8).untyped_storage()


def view(mapping: torch.UntypedStorage, offset_bytes: int, size_bytes: int) -> torch.Tensor:
    """Return a piece of a mapping as a tensor with a storage of its own.

    Args:
        mapping: From `map_private`.
        offset_bytes: Where it begins.
        size_bytes: How long it is, 1 at least.

    Returns:
        uint8 `[size_bytes]`; nothing is copied.
    """
    piece: torch.UntypedStorage = mapping[offset_bytes : offset_bytes + size_bytes]
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(piece)


class Arena:
    """Memory that grows as pieces of it are asked for, to be sealed when all are filled.

    Its pieces can be had as tensors before there is anything in them: views of a private mapping, which show what is
    written to the memory later on.

    Args:
        capacity_bytes: Most that can be asked for; costs address space only.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._owner = ExitStack()
        self._memory = new_memory("arena", self._owner)
        self.fd = self._memory.fd
        self.used_bytes = 0
        self._capacity_bytes = capacity_bytes
        os.ftruncate(self.fd, capacity_bytes)
        self.mapping = map_private(self.fd, capacity_bytes)

    def reserve(self, size_bytes: int) -> int | None:
        """Return where a new piece begins; None where there is no room left."""
        begin = -(-self.used_bytes // ALIGN_BYTES) * ALIGN_BYTES
        if begin + size_bytes > self._capacity_bytes:
            return None
        self.used_bytes = begin + size_bytes
        return begin

    def put(self, data: memoryview) -> int:
        """Copy bytes into a new piece; return where it begins."""
        begin = -(-self.used_bytes // ALIGN_BYTES) * ALIGN_BYTES
        self.used_bytes = begin + len(data)
        if self.used_bytes > self._capacity_bytes:  # never by tensors of the files; a class may compute more
            self._capacity_bytes = self.used_bytes
            os.ftruncate(self.fd, self._capacity_bytes)
        write_at(self.fd, data, begin, path=_ARENA)
        return begin

    def backed(self) -> Backed:
        """Return what writes to pieces that were reserved, when no more will be asked for.

        The caller closes it. It has a descriptor of its own: threads that cannot be ended in time may write to it when
        the arena is closed, and the number of a descriptor that was closed may be another file's by then.
        """
        return Backed(os.dup(self.fd), [(0, self.used_bytes)], owns_fd=True)

    def writable(self, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Return pieces that can be written to; it cannot be frozen while one of them lives.

        Args:
            offsets: From `reserve`.
            sizes: In bytes, as reserved.
        """
        with closing(self.backed()) as backed:
            backed.prepare(0, self.used_bytes)
        mapping = _map(self.fd, self.used_bytes, shared=True)
        return tuple(view(mapping, *piece) for piece in zip(offsets, sizes, strict=True))

    def cut(self) -> None:
        """Give back the room that was not asked for."""
        self._capacity_bytes = self.used_bytes
        os.ftruncate(self.fd, self.used_bytes)

    def freeze(self) -> None:
        """Let nobody write to it again."""
        freeze(self._memory)

    def close(self) -> None:
        """Close the descriptor; mappings stay valid."""
        self._owner.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """Where some files are mapped in this process just now: `spans` are (start, stop, number of the file, offset)."""

    spans: tuple[tuple[int, int, int, int], ...]

    def locate(self, address: int, size_bytes: int) -> tuple[int, int] | None:
        """Return (number of the file, offset in it) of a piece of memory; None where it is not of these files."""
        found = bisect.bisect_right(self.spans, (address, sys.maxsize)) - 1
        if found < 0:
            return None
        start, stop, number, offset_bytes = self.spans[found]
        if address + size_bytes > stop:
            return None
        return number, address - start + offset_bytes

    def looked_at(self, number: int, *, filled_bytes: int = 0, probed: Sequence[int] = ()) -> bool:
        """Say whether this process has looked at a file through any mapping of it that is still there.

        The kernel tells: a page that was read has an entry in this process's page table. It enters the pages of up to
        64 KiB of address space around it along with it, those that are in memory.

        Args:
            number: The file's place in the call of `mapped_now`.
            filled_bytes: So much of the file, from its beginning, may have been looked at.
            probed: Places in the file of which one byte may have been looked at.
        """
        for start, stop, of, offset_bytes in self.spans:
            if of != number:
                continue
            first = start - offset_bytes  # the address of the file's beginning, if it were mapped
            allowed = {(first + place) // WINDOW_BYTES for place in probed}
            allowed |= set(range(first // WINDOW_BYTES, (first + filled_bytes) // WINDOW_BYTES))
            if not _windows_present(start, stop) <= allowed:
                return True
        return False


def _windows_present(start: int, stop: int) -> set[int]:
    """Return the windows of address space in which pages are present; {-1} where the kernel does not tell."""
    page_bytes, step = mmap.PAGESIZE, 1 << 20
    found: set[int] = set()
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        for begin in range(start // page_bytes, stop // page_bytes, step):
            count = min(step, stop // page_bytes - begin)
            raw = os.pread(pagemap.fileno(), count * _ENTRY_BYTES, begin * _ENTRY_BYTES)
            if len(raw) != count * _ENTRY_BYTES:
                return {-1}
            entries = torch.frombuffer(bytearray(raw), dtype=torch.int64)
            present = ((entries >> 62) & _PRESENT).nonzero().flatten() + begin
            found |= set(torch.div(present * page_bytes, WINDOW_BYTES, rounding_mode="floor").tolist())
    return found


def mapped_now(fds: Sequence[int]) -> Mapped:
    """Find every mapping of some files in this process, whoever made it.

    Args:
        fds: Descriptors of the files.

    Returns:
        The mappings; a file is known by its place in `fds`.
    """
    numbers = {}
    for number, fd in enumerate(fds):
        info = os.fstat(fd)
        numbers[f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}", str(info.st_ino)] = number
    spans = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        address, _, offset, device, inode, *_ = line.split(maxsplit=5)
        number = numbers.get((device, inode), -1)
        if number >= 0:
            start, stop = (int(part, 16) for part in address.split("-"))
            spans.append((start, stop, number, int(offset, 16)))
    return Mapped(spans=tuple(sorted(spans)))
