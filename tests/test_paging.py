"""Memory backed by huge pages: the same bytes, no page that was not wanted, and all the same where there are none."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from safeload import advising, paging
from safeload.advising import MADV_COLLAPSE, advise, knows, punch
from safeload.errors import SourceError
from safeload.holding import Memory, freeze, new_memory
from safeload.mapping import Arena, can_map, map_private, view
from safeload.paging import Backed, Trial, Window, huge_page_bytes

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


def _mappings(fd: int) -> list[tuple[int, int]]:
    """Where some memory is mapped in this process."""
    inode = str(os.fstat(fd).st_ino)
    found = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        span, _, _, _, number, *_ = line.split(maxsplit=5)
        if number == inode and "memfd" in line:
            begin, _, end = span.partition("-")
            found.append((int(begin, 16), int(end, 16)))
    return found


def _is_free(address: int, size_bytes: int) -> bool:
    """Whether nothing is mapped at an address."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        begin, end = (int(part, 16) for part in line.split(" ")[0].split("-"))
        if begin < address + size_bytes and address < end:
            return False
    return True


def _descriptors(fd: int) -> int:
    """How many descriptors of some memory this process has."""
    inode, found = os.fstat(fd).st_ino, 0
    for each in os.listdir("/proc/self/fd"):
        try:
            found += os.stat(f"/proc/self/fd/{each}").st_ino == inode
        except OSError:  # the listing's own
            continue
    return found


def _data(fd: int, size_bytes: int) -> list[tuple[int, int]]:
    """Which parts of some memory have pages."""
    found, at = [], 0
    while at < size_bytes:
        try:
            begin = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:
            break
        at = os.lseek(fd, begin, os.SEEK_HOLE)
        found.append((begin, at))
    return found


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
        return advise(window.address, window.address + page, MADV_COLLAPSE)


needs_huge_pages = pytest.mark.skipif(not _gives_huge_pages(), reason="this kernel gives no huge pages to memory")


@needs_huge_pages
def test_a_filled_memory_is_in_huge_pages(memory: int, patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    page = huge_page_bytes()
    asked = []
    monkeypatch.setattr(paging, "advise", lambda *args: asked.append(args) or advise(*args))
    size_bytes = 9 * page + 12345
    data = random.Random(0).randbytes(size_bytes)
    os.ftruncate(memory, size_bytes)
    backed = Backed(memory, [(0, size_bytes)])
    for begin in range(0, size_bytes, 1 << 20):
        backed.write(memoryview(data)[begin : begin + (1 << 20)], begin, path=HERE)
    backed.close()
    assert os.pread(memory, size_bytes, 0) == data
    assert _huge_bytes(memory, size_bytes) == 9 * page
    assert sum(end - begin for begin, end, _ in asked) == 9 * page  # for each once


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


@needs_huge_pages
def test_huge_pages_are_made_some_ahead_of_the_bytes(memory: int, patient: None) -> None:
    page = huge_page_bytes()
    os.ftruncate(memory, 40 * page)
    backed = Backed(memory, [(0, 40 * page)])
    backed.write(memoryview(b"x"), page + 5, path=HERE)
    assert _data(memory, 40 * page) == [(page, (1 + paging._AHEAD_PAGES) * page)]
    backed.close()


@needs_huge_pages
def test_pages_are_made_inside_the_ranges_and_none_outside(memory: int, patient: None) -> None:
    page = huge_page_bytes()
    os.ftruncate(memory, 40 * page)
    ranges = [(page // 2, 3 * page + 5), (30 * page, 32 * page)]
    backed = Backed(memory, ranges)
    backed.prepare(0, 40 * page)
    assert _data(memory, 40 * page) == [(page, 3 * page), (30 * page, 32 * page)]  # whole pages
    backed.write(memoryview(b"x"), page // 2, path=HERE)
    assert os.pread(memory, 1, page // 2) == b"x"


@pytest.mark.parametrize("refusal", ["the kernel does not know it", "no address space"])
def test_without_huge_pages_the_bytes_are_the_same(memory: int, refusal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(*_: object, **__: object) -> None:
        asked.append(refusal)
        raise OSError(22, refusal)

    target = "Window" if refusal == "no address space" else "libc"
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
@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM])
def test_a_kernel_that_gives_no_more_is_not_asked_again(
    memory: int, number: int, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse_the_second(begin: int, end: int, advice: int) -> bool:
        asked.append(end - begin)
        ctypes.set_errno(number)
        return len(asked) == 1 and advise(begin, end, advice)

    monkeypatch.setattr(paging, "advise", refuse_the_second)
    page = huge_page_bytes()
    size_bytes = 5 * paging._AHEAD_PAGES * page
    data = random.Random(2).randbytes(size_bytes)
    os.ftruncate(memory, size_bytes)
    backed = Backed(memory, [(0, size_bytes)])
    backed.write(memoryview(data), 0, path=HERE)
    assert asked == [paging._AHEAD_PAGES * page] * 2
    assert _mappings(memory) == []  # given back as soon as it is of no use
    assert os.pread(memory, size_bytes, 0) == data
    assert _huge_bytes(memory, size_bytes) == paging._AHEAD_PAGES * page


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


@pytest.mark.parametrize(
    ("patience", "seconds", "taken"),
    [
        (1, [0.1, 0.1, 0.3, 0.1, 0.1], 3),
        (2, [0.1, 0.3, 0.1, 0.3, 0.3, 0.1], 5),
        (2, [0.2, 0.2, 0.2], 3),  # as much as small pages is not dear
        (1, [0.3], 1),
    ],
)
def test_a_trial_ends_for_good_after_some_dear_steps_in_a_row(patience: int, seconds: list[float], taken: int) -> None:
    trial = Trial(0.2 / 1024, patience=patience)
    went_on = []
    for each in seconds:
        went_on.append(trial.goes_on)
        trial.note(each, 1024)
    assert went_on.count(True) == taken
    assert went_on == sorted(went_on, reverse=True)  # never again


def test_what_is_dear_depends_on_how_much_memory_it_was() -> None:
    trial = Trial(0.001, patience=1)
    trial.note(0.9, 1000)
    assert trial.goes_on
    trial.note(0.9, 800)
    assert not trial.goes_on


@needs_huge_pages
def test_memory_in_huge_pages_can_be_sealed(patient: None) -> None:
    with ExitStack() as owner:
        made = new_memory("test", owner)
        os.ftruncate(made.fd, 8 << 21)
        backed = Backed(made.fd, [(0, 8 << 21)])
        backed.prepare(0, 8 << 21)
        assert len(_mappings(made.fd)) == 1  # it is still there
        freeze(made)
        backed.close()
        assert _mappings(made.fd) == []
        with pytest.raises(PermissionError):
            os.pwrite(made.fd, b"x", 0)


@needs_huge_pages
def test_what_is_closed_holds_no_mapping_and_only_its_own_descriptor_is_closed(memory: int, patient: None) -> None:
    page = huge_page_bytes()
    os.ftruncate(memory, 8 * page)
    for owns in (True, False):
        backed = Backed(os.dup(memory) if owns else memory, [(0, 8 * page)], owns_fd=owns)
        backed.prepare(0, page)
        assert len(_mappings(memory)) == 1
        assert _descriptors(memory) == (2 if owns else 1)
        backed.close()
        backed.close()
        assert _mappings(memory) == []
        assert _descriptors(memory) == 1
        with pytest.raises(SourceError, match="Bad file descriptor"):
            backed.write(memoryview(b"late"), 0, path=HERE)  # by no means to whatever has its number now


def test_what_writes_to_an_arena_may_outlive_it() -> None:
    arena = Arena(1 << 22)
    piece = arena.reserve(1 << 20)
    backed, mapping = arena.backed(), arena.mapping
    number = arena.fd
    arena.close()
    other = os.memfd_create("another's")
    try:
        assert other == number  # the number of a descriptor that was closed is used again
        backed.write(memoryview(b"late"), piece, path=HERE)
        assert bytes(view(mapping, piece, 4).tolist()) == b"late"
        assert os.fstat(other).st_size == 0
        shown = backed._fd
        backed.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(shown)
    finally:
        os.close(other)


def test_an_arena_that_is_filled_through_its_pieces_keeps_nothing_that_backed_them(
    patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    monkeypatch.setattr(paging.Backed, "prepare", lambda self, *_: made.append(self))
    arena = Arena(1 << 23)
    begin = arena.reserve(1 << 22)
    before = _descriptors(arena.fd), len(_mappings(arena.fd))
    (piece,) = arena.writable([begin], [1 << 22])
    assert len(made) == 1
    assert (_descriptors(arena.fd), len(_mappings(arena.fd))) == (before[0], before[1] + 1)
    piece.fill_(3)
    assert os.pread(arena.fd, 2, begin) == b"\3\3"
    del piece
    arena.freeze()
    arena.close()


@pytest.mark.parametrize("size_bytes", [1, mmap.PAGESIZE, (1 << 21) + 1])
def test_a_window_shows_the_memory_and_goes_with_the_last_tensor(memory: int, size_bytes: int) -> None:
    os.pwrite(memory, b"a" * size_bytes, 0)
    whole = view(map_private(memory, size_bytes), 0, size_bytes)
    tail = whole[-1:]
    ((begin, end),) = _mappings(memory)
    assert whole.data_ptr() == begin
    assert begin % (huge_page_bytes() or mmap.PAGESIZE) == 0
    assert bool((whole == ord("a")).all())
    whole.fill_(0)  # stays in this mapping
    assert os.pread(memory, size_bytes, 0) == b"a" * size_bytes
    del whole
    assert _mappings(memory) == [(begin, end)]
    assert tail.item() == 0
    del tail
    assert _mappings(memory) == []
    assert _is_free(begin, end - begin)


class _Kernel:
    """The C library, with `mmap` in its own way."""

    def __init__(self, mmap: Any) -> None:
        self._mmap = mmap

    def mmap(self, *arguments: Any) -> int:
        return self._mmap(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(advising.libc(), name)


@pytest.mark.parametrize("fails", ["the place", "the memory"])
def test_nothing_is_left_of_a_window_that_cannot_be_mapped(
    memory: int, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(*arguments: Any) -> int:
        *_, fd, _ = arguments
        if (fails == "the memory") == (fd == memory):
            ctypes.set_errno(errno.EPERM)
            return paging._MAP_FAILED
        asked.append(advising.libc().mmap(*arguments))
        return asked[-1]

    monkeypatch.setattr(paging, "libc", lambda: _Kernel(refuse))
    monkeypatch.setattr(paging, "huge_page_bytes", lambda: 1 << 21)
    os.ftruncate(memory, 1 << 21)
    with pytest.raises(PermissionError):
        Window(memory, 1 << 21)
    assert len(asked) == (fails == "the memory")
    assert all(_is_free(address, 2 << 21) for address in asked)
    assert _mappings(memory) == []


@pytest.mark.parametrize("times", [1, paging._TRIES])
def test_a_window_takes_no_place_from_another_thread(memory: int, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    os.pwrite(memory, b"a" * (1 << 21), 0)
    others = []

    def come_first(*arguments: Any) -> int:
        address, *_, fd, _ = arguments
        if fd == memory and len(others) < times:  # the place was free a moment ago
            rw = mmap.PROT_READ | mmap.PROT_WRITE
            anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | paging._MAP_FIXED_NOREPLACE
            others.append(advising.libc().mmap(address, mmap.PAGESIZE, rw, anonymous, -1, 0))
            assert others[-1] == address
            ctypes.memset(address, ord("b"), mmap.PAGESIZE)
        return int(advising.libc().mmap(*arguments))

    monkeypatch.setattr(paging, "libc", lambda: _Kernel(come_first))
    monkeypatch.setattr(paging, "huge_page_bytes", lambda: 1 << 21)
    window = Window(memory, 1 << 21)
    assert bytes(window.buffer) == b"a" * (1 << 21)
    assert len(others) == times
    if times < paging._TRIES:
        assert window.address % (1 << 21) == 0  # else anywhere
    del window
    assert _mappings(memory) == []
    for address in others:
        assert ctypes.string_at(address, mmap.PAGESIZE) == b"b" * mmap.PAGESIZE
        advising.libc().munmap(address, mmap.PAGESIZE)


def test_what_is_written_to_a_shared_window_reaches_the_memory_and_to_another_does_not(memory: int) -> None:
    os.ftruncate(memory, 1 << 20)
    shared, own = Window(memory, 1 << 20, shared=True), Window(memory, 1 << 20)
    own.buffer[0] = b"x"
    shared.buffer[1] = b"y"
    assert os.pread(memory, 2, 0) == b"\0y"
    assert own.buffer[:2] == b"x\0"  # a copy of its own since it was written to


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


def test_a_kernel_is_asked_what_it_knows_without_any_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    normal, unknown = 0, 9999
    knows.cache_clear()
    try:
        assert knows(normal)  # on every kernel
        ctypes.set_errno(0)
        assert not knows(unknown)
        assert ctypes.get_errno() == errno.EINVAL
        monkeypatch.setattr(advising.sys, "platform", "elsewhere")
        knows.cache_clear()
        assert not knows(normal)
    finally:
        knows.cache_clear()


@pytest.mark.parametrize("name", [name for name in advising.__all__ if name.startswith("MADV_")])
def test_an_advice_that_is_known_without_memory_is_known_for_memory(name: str) -> None:
    advice = getattr(advising, name)
    with mmap.mmap(-1, 1 << 16, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapping:
        here = ctypes.c_char.from_buffer(mapping)
        begin = ctypes.addressof(here)
        taken = advise(begin, begin + (1 << 16), advice)
        del here
    if advice == MADV_COLLAPSE:  # of memory that is too small for it: it may be known, and not be taken
        assert not taken
    else:
        assert taken == knows(advice)


def test_pages_are_given_back(memory: int) -> None:
    page = mmap.PAGESIZE
    os.pwrite(memory, b"x" * (4 * page), 0)
    assert punch(memory, page, 3 * page)
    assert _data(memory, 4 * page) == [(0, page), (3 * page, 4 * page)]
    assert os.pread(memory, 4 * page, 0) == b"x" * page + bytes(2 * page) + b"x" * page
    sealed = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
    try:
        os.pwrite(sealed, b"x" * page, 0)
        freeze(Memory(fd=sealed, path=None))
        assert not punch(sealed, 0, page)
        assert os.pread(sealed, page, 0) == b"x" * page
    finally:
        os.close(sealed)
