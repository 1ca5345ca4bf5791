"""Some ranks of a group load among themselves, and collectives whose beginning may block, as those of NCCL do."""

import contextlib
import os
import signal
import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest

from safeload.errors import PeerError, SafeLoadError
from safeload.group import join_group
from tests.ranks import on_ranks, run_on_ranks
from tests.test_group import SHORT, work_through
from tests.test_group_faults import count_leftovers

PROMPT_S = 10.0


def send_among(g, ranks, value, ready=lambda index: None):
    """Send a few bytes among some ranks from the first of them; what this rank has in the end."""
    import torch

    bucket = torch.zeros(4, dtype=torch.uint8)
    if g.rank in ranks:
        with g.among(ranks) as part:
            bucket.fill_(value if part.is_source else 0)
            part.stream("broadcast", [4], lambda index: bucket, lambda index, tensor: None, ready=ready)
            assert part.devices[0] == "cpu"
            assert (part.size, part.global_rank) == (len(ranks), g.global_rank)
    return bucket.tolist()


@on_ranks(3, store="tcp")
def test_ranks_in_different_numbers_of_groups_and_nothing_left_after_many_loads():
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    dist.new_group([0, 1])  # torch's own new_group for ranks 0 and 2 alone would wait for ever after this
    groups = len(distributed_c10d._world.pg_names)

    def load(number):
        with join_group(timeout=SHORT) as g:
            g.agree("broadcast", lambda: None)
            assert send_among(g, [2, 0], 10 + number) == [0 if g.rank == 1 else 10 + number] * 4
            assert send_among(g, [0, 2], 20 + number) == [0 if g.rank == 1 else 20 + number] * 4

    load(0)
    before = count_leftovers()
    for number in range(1, 8):
        load(number)
    assert count_leftovers() == before
    assert len(distributed_c10d._world.pg_names) == groups


@on_ranks(3)
def test_a_failure_among_some_reaches_all_and_they_load_again():
    def fail(index):
        raise OSError("no route")

    with pytest.raises(PeerError, match="no route") as caught, join_group(timeout=SHORT) as g:
        g.agree("broadcast", lambda: send_among(g, [1, 2], 1, ready=fail))
    assert caught.value.rank == 1
    with join_group(timeout=SHORT) as g:
        assert send_among(g, [1, 2], 5) == [0 if g.rank == 0 else 5] * 4


@on_ranks(2)
def test_by_public_means_where_the_backend_has_moved():
    import torch.distributed as dist

    del dist.ProcessGroupGloo
    with join_group(timeout=SHORT) as g:
        assert send_among(g, [1, 0], 7) == [7] * 4


def connect_without_one(kind):
    """One rank does not come to connect: it ends, or it is silent."""
    began = time.monotonic()
    with pytest.raises(SafeLoadError) as caught, join_group(timeout=timedelta(seconds=4)) as g:
        g.agree("broadcast", lambda: None)
        if g.rank == 2:
            if kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(7)
        g.agree("broadcast", lambda: send_among(g, [0, 1, 2], 1))
    assert type(caught.value) is PeerError
    assert 2 in caught.value.failures
    assert kind != "killed" or list(caught.value.failures) == [2]
    return time.monotonic() - began


@pytest.mark.parametrize("kind", ["killed", pytest.param("silent", marks=pytest.mark.slow)])
def test_a_rank_that_does_not_come_to_connect(kind):
    results = run_on_ranks(3, connect_without_one, kind)
    for result in results[:2]:
        assert result.ok, result.describe()
        assert result.value < PROMPT_S
    assert results[2].ok == (kind == "silent"), results[2].describe()


def lose_a_bystander():
    """The ranks of the part wait for its source, whose work takes long, when a rank outside of the part is killed."""

    def work(index):
        until = time.monotonic() + 30
        while time.monotonic() < until:
            source.check()
            time.sleep(0.05)

    began = time.monotonic()
    with pytest.raises(PeerError) as caught, join_group(timeout=timedelta(seconds=60)) as g:
        g.agree("broadcast", lambda: None)
        if g.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

        def both():
            nonlocal source
            import torch

            bucket = torch.zeros(4, dtype=torch.uint8)
            with g.among([0, 2]) as source:
                source.stream("broadcast", [4], lambda index: bucket, lambda index, tensor: None, ready=work)

        source = None
        g.agree("broadcast", both)
    assert list(caught.value.failures) == [1]
    return time.monotonic() - began


def test_a_rank_outside_of_the_part_is_missed_as_soon():
    results = run_on_ranks(3, lose_a_bystander)
    for result in (results[0], results[2]):
        assert result.ok, result.describe()
        assert result.value < PROMPT_S
    assert results[1].exit_status == -signal.SIGKILL


class _Work:
    """A collective that has ended."""

    def is_completed(self):
        return True

    def wait(self):
        return True


@contextlib.contextmanager
def beginning(begin):
    """A group whose collectives begin as told, on a device that is not the cpu."""
    with join_group(timeout=timedelta(seconds=3)) as g:
        g._transfers._members = replace(g._members, begin=begin)
        yield g


def stream_on_a_device(g):
    import torch

    bucket = torch.zeros(4, dtype=torch.uint8, device="meta")
    g.stream("broadcast", [4, 4], lambda index: bucket, lambda index, tensor: None, device="meta")


def block_in_the_beginning(kind):
    """NCCL connects to the others in its first collective, and waits there for a rank that is gone."""
    released, rank = threading.Event(), int(os.environ["RANK"])

    def begin(tensor, source_rank):
        if rank == 1 and kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "error" and rank == 1:
            raise RuntimeError("unhandled system error")
        released.wait(60)
        return _Work()

    began = time.monotonic()
    with pytest.raises(PeerError) as caught, beginning(begin) as g:
        stream_on_a_device(g)
    seconds = time.monotonic() - began
    stuck = [thread for thread in threading.enumerate() if thread.name == "safeload-begin"]
    assert all(thread.daemon for thread in stuck)
    released.set()
    for thread in stuck:
        thread.join(5)
        assert not thread.is_alive()
    if kind != "killed":
        work_through()  # the process group's other backend works on
    return sorted(caught.value.failures), seconds


@pytest.mark.parametrize(("kind", "blamed", "limit_s"), [("killed", [1], 10), ("silent", [0], 9), ("error", [1], 10)])
def test_a_collective_whose_beginning_blocks(kind, blamed, limit_s):
    results = run_on_ranks(2 if kind == "silent" else 3, block_in_the_beginning, kind)
    for result in results:
        if kind == "killed" and result.rank == 1:
            assert result.exit_status == -signal.SIGKILL
            continue
        assert result.ok, result.describe()
        failures, seconds = result.value
        assert set(blamed) <= set(failures), failures
        assert seconds < limit_s


@on_ranks(2)
def test_collectives_of_an_accelerator_begin_one_after_another_on_one_thread():
    import torch

    names, streams = [], []
    real = torch.device("meta")
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda: real
    torch.accelerator.current_stream = lambda device: f"stream of {device}"
    torch.accelerator.set_stream = streams.append

    def begin(tensor, source_rank):
        names.append(threading.current_thread().name)
        return _Work()

    with beginning(begin) as g:
        stream_on_a_device(g)
    assert names == ["safeload-begin"] * 2
    assert streams == ["stream of meta"] * 2  # the caller's, or the bytes would be sent before they are there
    assert "safeload-begin" not in {thread.name for thread in threading.enumerate()}
