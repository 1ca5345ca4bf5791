"""Pages of mapped memory are looked at behind whoever fills it, and never before."""

from __future__ import annotations

import mmap
import os
import time
from contextlib import ExitStack

import pytest

from safeload import touching
from safeload.advising import MADV_POPULATE_READ, advise, knows
from safeload.chilling import drop, resident_share
from safeload.deferring import Place
from safeload.mapping import WINDOW_BYTES, map_private, mapped_now, view
from safeload.planning import LoadPlan, Segment
from safeload.reading import announce
from safeload.sharing import Blocks, Layout
from safeload.touching import Touching

WINDOWS = 8
SIZE = WINDOWS * WINDOW_BYTES


@pytest.fixture
def memory():
    with ExitStack() as stack:
        fd = os.memfd_create("test")
        stack.callback(os.close, fd)
        os.ftruncate(fd, 2 * SIZE)
        yield fd


def entered(segment):
    """How many pages of some memory are in this process's page table."""
    first, count = segment.data_ptr() // mmap.PAGESIZE, segment.numel() // mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        raw = os.pread(pagemap.fileno(), 8 * count, 8 * first)
    return int(sum(entry >> 63 for entry in memoryview(raw).cast("Q")))


def until(condition):
    end = time.monotonic() + 5
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def test_everything_that_is_there_is_looked_at(memory):
    os.pwrite(memory, b"x" * SIZE, 0)
    segment = view(map_private(memory, 2 * SIZE), 0, SIZE)
    seen = mapped_now([memory])
    assert not seen.looked_at(0)
    with Touching([segment], lambda number: True) as begun:
        assert until(lambda: not begun._thread.is_alive())
    assert seen.looked_at(0)


def test_what_is_not_there_is_waited_for(memory):
    os.pwrite(memory, b"x" * SIZE, 0)
    mapping = map_private(memory, 2 * SIZE)
    segments = [view(mapping, 0, SIZE), view(mapping, SIZE, SIZE)]
    layout = Layout(
        sizes=(2 * SIZE,),
        sealed=(True,),
        places=(Place(block=0, offset_bytes=0), Place(block=0, offset_bytes=SIZE)),
        node="",
        address="",
    )
    blocks = Blocks((memory,), layout)
    plan = LoadPlan(tensors=(), segments=(Segment(size_bytes=SIZE),) * 2)
    with Touching(segments, lambda number: blocks.is_there(plan, number)) as begun:
        assert until(lambda: mapped_now([memory]).looked_at(0))
        time.sleep(0.1)
        assert begun._thread.is_alive()
        assert os.lseek(memory, 0, os.SEEK_HOLE) == SIZE  # looking at it would have made it
        assert not mapped_now([memory]).looked_at(0, filled_bytes=SIZE)
        os.pwrite(memory, b"y" * SIZE, SIZE)
        assert until(lambda: not begun._thread.is_alive())
    assert mapped_now([memory]).looked_at(0, filled_bytes=SIZE)


@pytest.mark.parametrize("kernel", ["new", "old"])
def test_memory_that_is_there_ahead_of_its_bytes_shows_them_when_they_come(memory, kernel, monkeypatch):
    monkeypatch.setattr(touching, "knows", lambda advice: kernel == "new" and knows(advice))
    os.pwrite(memory, bytes(SIZE), 0)  # pages, and nothing in them yet: as huge ones are, ahead of the bytes
    place = (Place(block=0, offset_bytes=0),)
    blocks = Blocks((memory,), Layout(sizes=(SIZE,), sealed=(True,), places=place, node="", address=""))
    plan = LoadPlan(tensors=(), segments=(Segment(size_bytes=SIZE),))
    (segment,) = blocks.map(plan)
    assert blocks.is_there(plan, 0)
    with Touching([segment], lambda number: blocks.is_there(plan, number)) as begun:
        assert until(lambda: not begun._thread.is_alive())
    assert entered(segment) == SIZE // mmap.PAGESIZE
    data = os.urandom(SIZE)
    os.pwrite(memory, data, 0)
    assert bytes(segment.numpy()) == data


def test_bytes_are_there_when_they_are_written_whatever_the_order(memory):
    page = mmap.PAGESIZE
    plan = LoadPlan(tensors=(), segments=(Segment(size_bytes=page),) * 3)
    places = tuple(Place(block=0, offset_bytes=at) for at in (4 * page, 0, page))
    blocks = Blocks((memory,), Layout(sizes=(2 * SIZE,), sealed=(True,), places=places, node="", address=""))

    def there():
        return [blocks.is_there(plan, number) for number in range(3)]

    assert there() == [False, False, False]
    os.pwrite(memory, b"x" * page, 0)
    assert there() == [False, True, False]
    os.pwrite(memory, b"x" * page, 4 * page)
    assert there() == [True, True, False]
    os.pwrite(memory, b"x" * page, page)
    assert there() == [True, True, True]


def resident_pages(path):
    return round((resident_share([str(path)]) or 0.0) * path.stat().st_size / mmap.PAGESIZE)


@pytest.fixture
def cold(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"x" * SIZE)
    drop([str(path)])
    if resident_pages(path):
        pytest.skip("this file system keeps its files in memory: none is ever cold")
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # nothing is read that nobody asked for
        yield path, file.fileno()


@pytest.fixture
def resident(monkeypatch):
    """Pages that are in memory, whatever this kernel brings there because it is asked."""
    pages, read = set(), os.preadv

    def preadv(fd, buffers, offset, flags=0):
        assert flags == os.RWF_NOWAIT
        if offset // mmap.PAGESIZE not in pages:
            raise BlockingIOError
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    return pages


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"x" * SIZE)
    with open(path, "rb", buffering=0) as opened:
        yield opened.fileno()


def test_a_file_is_there_when_it_has_been_read(file, resident):
    plan = LoadPlan(tensors=(), segments=(Segment(size_bytes=SIZE),))
    places = (Place(block=0, offset_bytes=0),)
    blocks = Blocks((file,), Layout(sizes=(SIZE,), sealed=(False,), places=places, node="", address=""))
    assert not blocks.is_there(plan, 0)
    resident.update(range(SIZE // mmap.PAGESIZE - 2))
    assert not blocks.is_there(plan, 0)
    resident.update(range(SIZE // mmap.PAGESIZE))
    assert blocks.is_there(plan, 0)


def test_pages_that_are_announced_come_together_and_no_others(cold):
    path, fd = cold
    announce(fd, [0, 3 * mmap.PAGESIZE + 5, 9 * mmap.PAGESIZE])
    assert until(lambda: resident_pages(path) == 3)
    for place in (0, 3 * mmap.PAGESIZE, 9 * mmap.PAGESIZE):
        assert os.preadv(fd, [bytearray(1)], place, os.RWF_NOWAIT) == 1


def test_a_tensor_that_ends_where_a_cold_one_was_looked_at_is_not_there(file, resident):
    edge = 4 * mmap.PAGESIZE + 100
    places = (Place(block=0, offset_bytes=0), Place(block=0, offset_bytes=edge))
    plan = LoadPlan(tensors=(), segments=(Segment(size_bytes=edge), Segment(size_bytes=SIZE - edge)))
    blocks = Blocks((file,), Layout(sizes=(SIZE,), sealed=(False,), places=places, node="", address=""))
    resident.update({0, 4})  # the beginnings of both
    assert not blocks.is_there(plan, 0)  # though its last byte is
    resident.update(range(SIZE // mmap.PAGESIZE))
    assert [blocks.is_there(plan, number) for number in range(2)] == [True, True]


def test_it_ends_with_its_block(memory):
    os.pwrite(memory, b"x" * SIZE, 0)
    segment = view(map_private(memory, SIZE), 0, SIZE)
    asked = []
    with Touching([segment], asked.append) as begun:  # which answers None: never
        assert until(lambda: asked)
        assert begun._thread.is_alive()
    assert not begun._thread.is_alive()
    assert not mapped_now([memory]).looked_at(0)


@pytest.mark.parametrize("kernel", ["new", "old"])
def test_pages_that_are_there_are_entered(memory, kernel, monkeypatch):
    advised = []
    monkeypatch.setattr(touching, "knows", lambda advice: kernel == "new" and knows(advice))
    monkeypatch.setattr(touching, "advise", lambda *args: advised.append(args) or advise(*args))
    os.pwrite(memory, b"x" * SIZE, 0)
    segment = view(map_private(memory, SIZE), 0, SIZE)
    assert not mapped_now([memory]).looked_at(0)
    with Touching([segment], lambda number: True) as begun:
        begun._thread.join(timeout=30)
    assert entered(segment) == SIZE // mmap.PAGESIZE
    begin = segment.data_ptr()
    asks = kernel == "new" and knows(MADV_POPULATE_READ)
    assert advised == ([(begin, begin + SIZE, MADV_POPULATE_READ)] if asks else [])
    assert os.pread(memory, SIZE, 0) == b"x" * SIZE


@pytest.mark.skipif(not knows(MADV_POPULATE_READ), reason="this kernel is older than 5.14")
def test_a_file_that_was_cut_short_does_not_end_the_process(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * SIZE)
    fd = os.open(path, os.O_RDWR)
    segment = view(map_private(fd, SIZE), 0, SIZE)
    os.ftruncate(fd, mmap.PAGESIZE)
    os.close(fd)
    assert entered(segment) == 0
    with Touching([segment], lambda number: True) as begun:
        begun._thread.join(timeout=30)
        assert not begun._thread.is_alive()
    assert entered(segment) == 1  # it was tried, as far as the file goes
