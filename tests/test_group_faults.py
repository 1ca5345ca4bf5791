"""Faults: where one rank fails, is killed, is stopped or is silent, every other rank raises the same error in time.

`walk` is a load in small: every kind of stage once. A fault is put into one stage on one rank, and each rank tells what
it raised and how long after the fault.
"""

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

from safeload.errors import IntegrityError, SafeLoadError
from safeload.group import join_group
from tests.ranks import on_ranks, run_on_ranks

STAGES = ("arguments", "seal", "report", "broadcast", "place")
PROMPT_S = 10.0


def walk(fault, *, source_rank=0, timeout_s=30.0):
    """Go through every kind of stage; `fault(stage, rank)` is called inside of each one's work."""
    import torch

    with join_group(source_rank=source_rank, timeout=timedelta(seconds=timeout_s)) as g:
        g.start({"path": "/towers/clip"})
        g.agree("arguments", lambda: fault("arguments", g.rank))
        g.on_source("seal", lambda: fault("seal", g.rank))
        g.send_bytes("plan", b"plan" if g.is_source else None)
        fault("report", g.rank)
        g.gather_bytes("report", b"row")
        bucket = torch.zeros(1000, dtype=torch.uint8)

        def take(index, tensor):
            if index == 2:
                fault("broadcast", g.rank)

        g.stream("broadcast", [1000] * 8, lambda index: bucket, take)
        g.agree("place", lambda: fault("place", g.rank))


def cause(kind):
    if kind == "typed":
        raise IntegrityError("bad bytes", path="model.safetensors")
    if kind == "foreign":
        raise ValueError("bad value")
    if kind == "exit":
        sys.exit(3)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "vanish":
        os._exit(0)
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "silence":
        time.sleep(9)


def suffer(folder, planned, source_rank=0, timeout_s=30.0):
    """Walk into the planned fault (stage, rank, kind). Tells what this rank raised, and how long after the fault."""
    stage, rank, kind = planned
    mark = Path(folder, "fault")

    def fault(at, on):
        if (at, on) == (stage, rank):
            mark.with_suffix(".new").write_text(f"{time.monotonic()} {os.getpid()}")
            mark.with_suffix(".new").rename(mark)
            cause(kind)

    try:
        walk(fault, source_rank=source_rank, timeout_s=timeout_s)
    except SafeLoadError as error:
        began, pid = mark.read_text().split() if mark.exists() else (0.0, 0)
        return {
            "class": type(error).__name__,
            "text": str(error),
            "rank": error.rank,
            "stage": error.stage,
            "seconds": time.monotonic() - float(began),
            "pid": int(pid),
        }
    return None


def suffer_and_go_on(folder, planned, source_rank=0):
    """Walk into a fault, then see that nothing is left and the same group works."""
    walk(lambda stage, rank: None)
    before = count_leftovers()
    seen = suffer(folder, planned, source_rank=source_rank)
    after = count_leftovers()
    walk(lambda stage, rank: None)
    return seen, before, after, count_leftovers()


def count_leftovers():
    """Count threads, descriptors and keys in the store, when every rank is idle."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    dist.barrier()
    store = distributed_c10d._get_process_group_store(dist.group.WORLD)
    counts = {
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "keys": store.num_keys(),
    }
    dist.barrier()
    return counts


@pytest.mark.parametrize("kind", ["typed", "foreign"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("stage", STAGES)
def test_an_exception_in_any_stage_on_any_rank(stage, rank, kind, tmp_path):
    source_rank = rank if stage == "seal" else 0
    results = run_on_ranks(3, suffer_and_go_on, tmp_path, (stage, rank, kind), source_rank, store="tcp")
    assert all(result.ok for result in results), "".join(result.describe() for result in results)
    seen = [result.value[0] for result in results]
    assert {each["class"] for each in seen} == {"IntegrityError" if kind == "typed" else "PeerError"}
    assert len({each["text"] for each in seen}) == 1
    assert {each["rank"] for each in seen} == {rank}
    assert max(each["seconds"] for each in seen) < PROMPT_S
    if stage != "report":  # that one is between two stages; it is told under the one before
        assert {each["stage"] for each in seen} == {stage}
    for result in results:
        _, before, after, at_the_end = result.value
        assert after == before
        assert at_the_end == before


ALWAYS = [("arguments", 1, "file"), ("seal", 0, "file"), ("broadcast", 0, "tcp"), ("broadcast", 1, "tcp")]


def _killed():
    for row in itertools.product(STAGES, (0, 1), ("file", "tcp")):
        yield pytest.param(*row, marks=[] if row in ALWAYS else [pytest.mark.slow])


@pytest.mark.parametrize(("stage", "rank", "store"), list(_killed()))
def test_a_killed_rank_in_any_stage(stage, rank, store, tmp_path):
    source_rank = rank if stage == "seal" else 0
    results = run_on_ranks(3, suffer, tmp_path, (stage, rank, "kill"), source_rank, store=store)
    assert results[rank].exit_status == -signal.SIGKILL
    survivors = [result for result in results if result.rank != rank]
    assert all(result.ok for result in survivors), "".join(result.describe() for result in survivors)
    for each in (result.value for result in survivors):
        assert each["class"] == "PeerError"
        assert each["seconds"] < PROMPT_S
        assert f"rank {rank} lost: its process (pid {each['pid']} on {os.uname().nodename}) has ended" in each["text"]
    if store == "file":  # with tcp, rank 0 takes the store with it, and each rank sees that for itself
        assert len({result.value["text"] for result in survivors}) == 1


@pytest.mark.parametrize("kind", ["vanish", "exit"])
def test_a_rank_that_exits_in_mid_load(kind, tmp_path):
    results = run_on_ranks(3, suffer, tmp_path, ("place", 1, kind), store="tcp")
    for result in (results[0], results[2]):
        assert result.ok, result.describe()
        assert result.value["class"] == "PeerError"
        assert result.value["rank"] == 1
        assert result.value["seconds"] < PROMPT_S
        assert ("SystemExit: 3" if kind == "exit" else "has ended") in result.value["text"]


def stop_and_continue(folder, stage, rank):
    seen = suffer(folder, (stage, rank, "stop"), timeout_s=4.0)
    if int(os.environ["RANK"]) != rank:
        with contextlib.suppress(ProcessLookupError):
            os.kill(seen["pid"], signal.SIGCONT)
    if stage != "broadcast":  # there the others had to abandon a collective: the process group is spent
        walk(lambda stage, rank: None)
    return seen


STOPPED = [pytest.param("arguments", 0, marks=pytest.mark.slow), ("arguments", 2), ("broadcast", 1)]


@pytest.mark.parametrize(("stage", "rank"), STOPPED)
def test_a_stopped_rank_ends_at_the_timeout_and_loads_again_when_it_continues(stage, rank, tmp_path):
    results = run_on_ranks(3, stop_and_continue, tmp_path, stage, rank, timeout_s=40)
    for result in results:
        assert result.ok, result.describe()
        assert result.value["class"] == "PeerError"
        who = f"pid {result.value['pid']} on {os.uname().nodename}"
        assert f"rank {rank} silent ({who}, stopped)" in result.value["text"]
        assert result.value["seconds"] < 4 + PROMPT_S


def test_a_stopped_rank_that_serves_the_store_ends_the_call_for_the_others(tmp_path):
    results = run_on_ranks(3, stop_and_continue, tmp_path, "arguments", 0, store="tcp", timeout_s=40)
    for result in results:
        assert result.ok, result.describe()
        assert result.value["class"] == "PeerError"
        if result.rank:
            assert "the store does not answer" in result.value["text"]
            assert result.value["seconds"] < PROMPT_S


@pytest.mark.slow  # as in the next two: the whole pipeline has a short form
@on_ranks(2)
def test_a_silent_rank_ends_at_the_timeout_while_it_is_still_at_work(tmp_path):
    seen = suffer(tmp_path, ("arguments", 1, "silence"), timeout_s=4.0)
    assert seen["class"] == "PeerError"
    assert "rank 1 silent" in seen["text"]
    assert "within 4 s" in seen["text"]
    if os.environ["RANK"] == "0":
        assert seen["seconds"] < 4 + 2
    walk(lambda stage, rank: None)


@pytest.mark.slow
@on_ranks(2, timeout_s=60)
def test_a_busy_source_is_told_of_the_timeout_and_of_the_others(tmp_path):
    seen = suffer(tmp_path, ("seal", 0, "silence"), timeout_s=4.0)
    assert seen["class"] == "PeerError"
    assert "rank 0 still at work" in seen["text"]
    walk(lambda stage, rank: None)


@on_ranks(3)
def test_long_work_can_ask_whether_it_still_makes_sense():
    def work():
        if g.rank == 1:
            raise IntegrityError("bad bytes")
        until = time.monotonic() + 20
        while time.monotonic() < until:
            g.check()
            time.sleep(0.01)

    began = time.monotonic()
    with pytest.raises(IntegrityError), join_group(timeout=timedelta(seconds=30)) as g:
        g.agree("seal", work)
    assert time.monotonic() - began < PROMPT_S


def interrupt_one():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it

    def work():
        if g.rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)

    with join_group(timeout=timedelta(seconds=30)) as g:
        g.agree("seal", work)


def test_ctrl_c_on_one_rank_ends_all(tmp_path):
    results = run_on_ranks(2, interrupt_one)
    assert type(results[0].error).__name__ == "PeerError"
    assert "KeyboardInterrupt" in str(results[0].error)
    assert isinstance(results[1].error, KeyboardInterrupt)
    assert max(result.seconds for result in results) < PROMPT_S


def _end_between(ending):
    import torch.distributed as dist

    with join_group(timeout=timedelta(seconds=30)):
        pass
    dist.barrier()
    if dist.get_rank() == ending:
        os._exit(0)
    time.sleep(0.5)
    start = time.monotonic()
    with pytest.raises(SafeLoadError, match=f"rank {ending}"), join_group(timeout=timedelta(seconds=30)):
        pass
    return time.monotonic() - start


@pytest.mark.parametrize("ending", [1, 2])
def test_a_rank_that_ended_after_a_quick_call_is_noticed_by_the_next_at_once(ending):
    results = run_on_ranks(3, _end_between, ending)
    told = [result for rank, result in enumerate(results) if rank != ending]
    assert all(result.ok for result in told), told[0].describe()
    assert max(result.value for result in told) < PROMPT_S
