"""Whatever becomes of a reading, nothing that helped to write is left, and nothing is written to what was closed."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import ExitStack

import pytest
import torch

from safeload import filling as filling_module
from safeload.errors import SourceError
from safeload.filling import Filling
from safeload.mapping import Arena, can_map, view
from safeload.paging import Backed
from safeload.resolving import resolve
from safeload.routing import Cast, Target, Wanted
from safeload.sealing import open_checkpoint
from safeload.verifying import Manifest
from tests import files

pytestmark = pytest.mark.skipif(not can_map(), reason="memory that can be sealed and mapped is Linux's")

NOTHING = Manifest(provenance="none", source="nothing", entries={})
ELEMENTS = 1 << 20
DATA_BYTES = 4 * ELEMENTS


@pytest.fixture
def backs(monkeypatch):
    """What was made to back memory, and what of it was closed."""
    made, closed = [], []
    init, close = Backed.__init__, Backed.close

    def note_init(self, *args, **kwargs):
        init(self, *args, **kwargs)
        made.append(self)

    def note_close(self):
        close(self)
        closed.append(self)

    monkeypatch.setattr(Backed, "__init__", note_init)
    monkeypatch.setattr(Backed, "close", note_close)
    return made, closed


@pytest.fixture
def folder(tmp_path):
    header = json.dumps(files.tensor("a", shape=(ELEMENTS,), begin=0, size=DATA_BYTES)).encode()
    header += b" " * (-len(header) % 8)  # elements begin where a chunk may end
    values = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(5))
    data = values.numpy().tobytes()
    return files.write(tmp_path, {"config.json": files.CONFIG, "model.safetensors": files.safetensors(header, data)})


@pytest.fixture
def reading(folder):
    """A reading that has not begun, the arena that its casts go to, and what holds both."""
    with ExitStack() as kept:
        opened = kept.enter_context(open_checkpoint(resolve(folder), NOTHING))
        reads = kept.enter_context(Filling(opened))
        arena = Arena(DATA_BYTES)
        kept.callback(arena.close)
        yield reads, arena, kept


def want(reads, arena):
    """Want all of the tensor in bfloat16, and nothing of the file but its header; return the piece to be filled."""
    begin = os.fstat(reads.memory_fds[0]).st_size - DATA_BYTES
    place = arena.reserve(DATA_BYTES // 2)
    cast = Cast(
        begin=begin,
        end=begin + DATA_BYTES,
        source_dtype=torch.float32,
        target=place,
        target_dtype=torch.bfloat16,
    )
    reads.want([Wanted(ranges=((0, reads.header_bytes[0]),), casts=(cast,))], arena.backed())
    return view(arena.mapping, place, DATA_BYTES // 2).view(torch.bfloat16)


def check_all_closed(backs, count):
    made, closed = backs
    assert len(made) == count
    assert set(map(id, made)) <= set(map(id, closed))
    assert all(back._window is None for back in made)


def expected():
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)


def test_a_reading_that_ends_well(reading, backs):
    reads, arena, kept = reading
    piece = want(reads, arena)
    kept.callback(reads.finish().close)
    assert torch.equal(piece, expected())
    check_all_closed(backs, 2)


def test_a_reading_that_nobody_told_what_is_wanted(reading, backs):
    reads, _, kept = reading
    kept.callback(reads.finish().close)
    check_all_closed(backs, 1)


@pytest.mark.parametrize("wanted", ["before it failed", "afterwards", "never"])
def test_a_reading_that_fails(reading, backs, wanted, monkeypatch):
    reads, arena, _ = reading
    take = Target.__call__

    def fail(self, offset, chunk):
        if offset:
            raise SourceError("the disk is gone")
        take(self, offset, chunk)

    monkeypatch.setattr(Target, "__call__", fail)
    if wanted == "before it failed":
        want(reads, arena)
    reads.start()
    with pytest.raises(SourceError, match="the disk is gone"):
        reads.wait_until(0, DATA_BYTES)
    if wanted == "afterwards":
        want(reads, arena)
    with pytest.raises(SourceError, match="the disk is gone"):
        reads.finish()
    check_all_closed(backs, 1 if wanted == "never" else 2)


def test_a_reading_that_is_not_needed(reading, backs):
    reads, arena, kept = reading
    want(reads, arena)
    kept.callback(reads.accept(["0" * 64]).close)
    check_all_closed(backs, 2)


def test_a_reading_that_is_given_up_before_it_began(reading, backs):
    reads, arena, kept = reading
    want(reads, arena)
    kept.close()
    check_all_closed(backs, 2)


def test_a_thread_that_is_stuck_writes_to_what_it_was_given_or_nowhere(reading, backs, monkeypatch):
    """Its write comes when the load is long over, and the numbers of its descriptors are used by others."""
    reads, arena, kept = reading
    stuck, free = threading.Event(), threading.Event()
    cast = Target._cast

    def wait_first(self, *args):
        if args[1]:
            stuck.set()
            free.wait(30)
        cast(self, *args)

    monkeypatch.setattr(Target, "_cast", wait_first)
    monkeypatch.setattr(filling_module, "_PATIENCE_S", 0.05)
    want(reads, arena)
    reads.start()
    assert stuck.wait(30)
    numbers = {arena.fd, reads.memory_fds[0]}
    kept.close()
    made, closed = backs
    assert len(made) == 2
    assert closed == []  # the thread may still write
    others = []
    while not numbers & set(others) and len(others) < 64:  # the arena's is free, the file's is not
        others.append(os.memfd_create("another's"))
    free.set()
    until = time.monotonic() + 30
    while len(set(map(id, closed))) < 2 and time.monotonic() < until:
        time.sleep(0.005)
    check_all_closed(backs, 2)
    assert arena.fd in others
    assert all(os.fstat(other).st_size == 0 for other in others)
    for other in others:
        os.close(other)


def _replaced(path):
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[::-1])
    os.replace(other, path)


def _written_in_place(path):
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")


def _written_and_dated_back(path):
    before = path.stat()
    _written_in_place(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    ("what", "is_harmless"),
    [
        (_replaced, True),
        (os.unlink, True),
        (lambda path: path.chmod(0o400), True),
        (lambda path: os.link(path, path.with_name("twin")), True),
        (_written_in_place, False),
        (_written_and_dated_back, False),
        (lambda path: os.truncate(path, path.stat().st_size - 1), False),
    ],
)
def test_a_mapped_file_may_change_its_name_and_rights_while_it_is_read_but_no_byte(folder, what, is_harmless):
    with ExitStack() as kept:
        opened = kept.enter_context(open_checkpoint(resolve(folder), NOTHING, memory="mapped"))
        reads = kept.enter_context(Filling(opened))
        time.sleep(0.02)  # a tick of the clock that files are dated by
        what(folder / "model.safetensors")
        if is_harmless:
            kept.enter_context(reads.finish())
        else:
            with pytest.raises(SourceError, match=r"changed while|shrank"):
                reads.finish()
