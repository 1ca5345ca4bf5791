"""A read of the source that never returns, as on a network disk that is gone: all ranks raise in time, it too.

The blocked thread can not be ended while the system holds it: it is left behind as a daemon with what it uses, and gone
when the read returns.
"""

import contextlib
import hashlib
import os
import sys
import threading
import time
from datetime import timedelta
from unittest import mock

import pytest

from safeload.errors import PeerError
from tests.ranks import on_ranks, run_on_ranks
from tests.test_faults import SOURCE, leftovers, load, use_temporary_folder
from tests.towers import clip_folder

TIMEOUT_S = 1.0
MARGIN_S = 6.0  # the source's patience with its threads, the others' with the source, and a slow machine
# What blocks, in which call of it, and what the message says of it.
STUCK = {
    "resolve": ("safeload.loading.resolve", 0, "clip is looked at"),
    "expect": ("safeload.loading.expect", 0, "clip is looked at"),
    "config": ("safeload.sealing.copy_hashed", 0, "clip is opened"),
    "headers": ("safeload.filling.read_start", 0, "clip is opened"),
    "first bytes": ("safeload.filling.copy_hashed", 0, "model.safetensors is read, 0 of "),
    "weights": ("safeload.routing.Target.__call__", 1, "model.safetensors is read, [1-9][0-9]* of "),
}


@pytest.fixture(scope="module")
def tower(tmp_path_factory):
    return clip_folder(tmp_path_factory.mktemp("towers") / "clip")


@contextlib.contextmanager
def stuck(work, count, *, everywhere=False):
    """Block the source in a read of an empty pipe, which is as deaf as one of a dead disk, until the end."""
    if int(os.environ["RANK"]) != SOURCE and not everywhere:
        yield
        return
    import importlib

    module, _, name = work.rpartition(".")
    owner = sys.modules.get(module) or importlib.import_module(module.removesuffix(".Target"))
    owner = owner.Target if module.endswith(".Target") else owner
    original, calls = getattr(owner, name), []
    reader, writer = os.pipe()

    def blocking(*args, **kwargs):
        calls.append(None)
        if len(calls) > count:
            os.read(reader, 1)
        return original(*args, **kwargs)

    try:
        with (
            mock.patch.object(owner, name, blocking),
            mock.patch("safeload.reading._CHUNK_BYTES", 100_000),
            mock.patch("safeload.filling._PATIENCE_S", 0.2),
        ):
            yield
    finally:
        os.close(writer)
        _join()
        os.close(reader)


def _join():
    """Wait until what was left behind is gone, now that the read returns."""
    until = time.monotonic() + 5
    while any("safeload" in thread.name for thread in threading.enumerate()) and time.monotonic() < until:
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("transport", "places"),
    [
        ("shared", ("resolve", "headers", "weights")),
        pytest.param("shared", tuple(STUCK), marks=pytest.mark.slow),
        pytest.param("broadcast", tuple(STUCK), marks=pytest.mark.slow),
    ],
)
@on_ranks(2)
def test_a_read_that_never_returns(transport, places, tower, tmp_path):
    import torch.distributed as dist

    use_temporary_folder(tmp_path)
    load(tower, transport=transport)
    dist.barrier()
    before = leftovers()
    for at in places:
        work, count, said = STUCK[at]
        began = time.monotonic()
        with stuck(work, count):
            with pytest.raises(PeerError, match=rf"rank {SOURCE} still at work: .*{said}") as caught:
                load(tower, transport=transport, timeout=timedelta(seconds=TIMEOUT_S))
            assert time.monotonic() - began < TIMEOUT_S + MARGIN_S, at
            assert caught.value.rank == SOURCE, at
            assert f"within {TIMEOUT_S:g} s" in str(caught.value), at
        del caught
        load(tower, transport=transport)
    dist.barrier()
    left = leftovers() - before
    assert not left, left


@on_ranks(4)
def test_a_read_that_never_returns_while_the_first_ranks_of_two_nodes_wait_for_its_bytes(tower):
    from safeload import delivering, handing, sharing

    key = handing.node_key() + " of host " + "abab"[int(os.environ["RANK"])]
    sharing.node_key = delivering.node_key = lambda: key
    load(tower, transport="shared")
    work, count, said = STUCK["weights"]
    with stuck(work, count), pytest.raises(PeerError, match=rf"rank {SOURCE} still at work: .*{said}") as caught:
        load(tower, transport="shared", timeout=timedelta(seconds=TIMEOUT_S))
    assert SOURCE in caught.value.failures  # the other node's first rank waits in a stage of its own
    load(tower, transport="shared")


@pytest.fixture
def locked(tmp_path):
    folder = clip_folder(tmp_path / "clip")
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in folder.iterdir()]
    (folder / "SHA256SUMS").write_text("".join(sums))
    return folder


@on_ranks(2)
def test_chunks_that_can_not_be_read(locked, tmp_path):
    os.environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    options = {"memory": "mapped", "transport": "shared", "chunk_digests": True, "verify": "auto"}
    load(locked, **options)
    with (
        stuck("safeload.chunking._hash_piece", 0, everywhere=True),
        pytest.raises(PeerError, match=rf"stage 'chunks' did not end within {TIMEOUT_S:g} s"),
    ):
        load(locked, **options, timeout=timedelta(seconds=TIMEOUT_S))
    load(locked, **options)


def load_alone(folder):
    """Block for good in the reading; this process is to end all the same, with the thread in it."""
    reader, _ = os.pipe()
    began = time.monotonic()
    with (
        mock.patch("safeload.filling.copy_hashed", side_effect=lambda *args, **kwargs: os.read(reader, 1)),
        pytest.raises(PeerError, match=r"rank 0 still at work: .*model\.safetensors is read, 0 of "),
    ):
        load(folder, source_rank=0, timeout=timedelta(seconds=TIMEOUT_S))
    return time.monotonic() - began, [thread.name for thread in threading.enumerate() if thread.daemon]


def test_a_process_on_its_own_raises_and_can_end_while_the_read_still_blocks(tower):
    (result,) = run_on_ranks(1, load_alone, tower, store="none", timeout_s=30)
    assert result.ok, result.describe()
    seconds, threads = result.value
    assert seconds < TIMEOUT_S + MARGIN_S
    assert "safeload-read" in threads
