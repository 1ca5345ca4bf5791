"""Memory backed by huge pages: the same bytes, no page that was not wanted, and all the same where there are none."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from safeload import paging
from safeload.holding import freeze, new_memory
from safeload.mapping import can_map, map_private, view
from safeload.paging import Backed, Window, huge_page_bytes

pytestmark = pytest.mark.skipif(not can_map(), reason="memory that can be sealed and mapped is Linux's")

HERE = Path("the test")


@pytest.fixture
def memory() -> Iterator[int]:
    with ExitStack() as owner:
        yield new_memory("test", owner).fd


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the machine takes to give a huge page."""
    monkeypatch.setattr(paging, "_MOST_S_PER_BYTE", float("inf"))


def _huge_bytes(fd: int, size_bytes: int) -> int:
    """How much of some memory is mapped by huge pages when all of it is looked at."""
    whole = view(map_private(fd, size_bytes), 0, size_bytes)
    whole[:: mmap.PAGESIZE].sum()
    found, here = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if "-" in line.split(" ")[0]:
            begin, end = (int(part, 16) for part in line.split(" ")[0].split("-"))
            here = begin <= whole.data_ptr() < end
        elif here and line.startswith("ShmemPmdMapped:"):
            found += int(line.split()[1]) * 1024
    return found


def _gives_huge_pages() -> bool:
    page = huge_page_bytes()
    if not page:
        return False
    with ExitStack() as owner:
        fd = new_memory("probe", owner).fd
        os.ftruncate(fd, page)
        os.posix_fallocate(fd, 0, 1)
        window = Window(fd, page, writable=False)
        return paging.advise(window.address, window.address + page, paging._COLLAPSE)


needs_huge_pages = pytest.mark.skipif(not _gives_huge_pages(), reason="this kernel gives no huge pages to memory")


@needs_huge_pages
def test_a_filled_memory_is_in_huge_pages(memory: int, patient: None) -> None:
    page = huge_page_bytes()
    size_bytes = 9 * page + 12345
    data = random.Random(0).randbytes(size_bytes)
    os.ftruncate(memory, size_bytes)
    backed = Backed(memory, [(0, size_bytes)])
    for begin in range(0, size_bytes, 1 << 20):
        backed.write(memoryview(data)[begin : begin + (1 << 20)], begin, path=HERE)
    backed.close()
    assert os.pread(memory, size_bytes, 0) == data
    assert _huge_bytes(memory, size_bytes) == 9 * page


@needs_huge_pages
def test_what_is_there_already_stays(memory: int, patient: None) -> None:
    page = huge_page_bytes()
    os.ftruncate(memory, 4 * page)
    os.pwrite(memory, b"before", page)
    os.pwrite(memory, b"before too", 3 * page - 100)
    Backed(memory, [(0, 4 * page)]).prepare(0, 4 * page)
    assert os.pread(memory, 6, page) == b"before"
    assert os.pread(memory, 10, 3 * page - 100) == b"before too"
    assert os.pread(memory, page, 0) == bytes(page)
    assert _huge_bytes(memory, 4 * page) == 4 * page


def test_no_page_is_made_outside_the_ranges(memory: int, patient: None) -> None:
    page = huge_page_bytes() or 1 << 21
    os.ftruncate(memory, 40 * page)
    ranges = [(page // 2, 3 * page + 5), (30 * page, 32 * page)]
    backed = Backed(memory, ranges)
    backed.prepare(0, 40 * page)
    assert os.fstat(memory).st_blocks * 512 <= 4 * page  # two whole pages of the first range, two of the second
    backed.write(memoryview(b"x"), page // 2, path=HERE)
    assert os.pread(memory, 1, page // 2) == b"x"


@pytest.mark.parametrize("refusal", ["the kernel does not know it", "no address space"])
def test_without_huge_pages_the_bytes_are_the_same(memory: int, refusal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(*_: object, **__: object) -> None:
        asked.append(refusal)
        raise OSError(22, refusal)

    target = "Window" if refusal == "no address space" else "_libc"
    monkeypatch.setattr(paging, target, refuse)
    monkeypatch.setattr(paging, "huge_page_bytes", lambda: 1 << 21)
    size_bytes = 5 << 21
    data = random.Random(1).randbytes(size_bytes)
    os.ftruncate(memory, size_bytes)
    backed = Backed(memory, [(0, size_bytes)])
    for begin in range(0, size_bytes, 1 << 20):
        backed.write(memoryview(data)[begin : begin + (1 << 20)], begin, path=HERE)
    assert os.pread(memory, size_bytes, 0) == data
    assert len(asked) == 1  # and never again


@needs_huge_pages
def test_no_more_are_asked_for_where_they_take_longer_than_small_ones(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paging, "_MOST_S_PER_BYTE", 0.0)
    page = huge_page_bytes()
    os.ftruncate(memory, 64 * page)
    backed = Backed(memory, [(0, 64 * page)])
    backed.prepare(0, 64 * page)
    assert os.fstat(memory).st_blocks * 512 == paging._AHEAD_PAGES * page


def test_memory_in_huge_pages_can_be_sealed(patient: None) -> None:
    with ExitStack() as owner:
        made = new_memory("test", owner)
        os.ftruncate(made.fd, 8 << 21)
        backed = Backed(made.fd, [(0, 8 << 21)])
        backed.prepare(0, 8 << 21)  # its mapping is still there
        freeze(made)
        with pytest.raises(PermissionError):
            os.pwrite(made.fd, b"x", 0)


@pytest.mark.parametrize("size_bytes", [1, 4096, (1 << 21) + 1])
def test_a_window_shows_the_memory_and_goes_with_the_last_tensor(memory: int, size_bytes: int) -> None:
    os.pwrite(memory, b"a" * size_bytes, 0)
    name = os.readlink(f"/proc/self/fd/{memory}").split(":")[0] + ":"

    def mappings() -> int:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        return sum(name in line for line in lines)

    before = mappings()
    whole = view(map_private(memory, size_bytes), 0, size_bytes)
    tail = whole[-1:]
    assert mappings() == before + 1
    assert whole.data_ptr() % (huge_page_bytes() or mmap.PAGESIZE) == 0
    assert bool((whole == ord("a")).all())
    whole.fill_(0)  # stays in this mapping
    assert os.pread(memory, size_bytes, 0) == b"a" * size_bytes
    del whole
    assert mappings() == before + 1
    assert tail.item() == 0
    del tail
    assert mappings() == before


def test_what_cannot_be_mapped_is_no_memory(memory: int) -> None:
    os.ftruncate(memory, 1 << 62)
    with pytest.raises(MemoryError, match="cannot be mapped"):
        map_private(memory, 1 << 62)


def test_a_system_without_huge_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    huge_page_bytes.cache_clear()
    try:
        monkeypatch.setattr(paging, "_SIZE", tmp_path / "is not there")
        assert huge_page_bytes() == 0
        (tmp_path / "arm").write_text("536870912\n", encoding="ascii")
        huge_page_bytes.cache_clear()
        monkeypatch.setattr(paging, "_SIZE", tmp_path / "arm")
        assert huge_page_bytes() == 0
    finally:
        huge_page_bytes.cache_clear()
