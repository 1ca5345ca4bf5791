"""Faults at odd moments in the whole pipeline: in users' code, two at once, from outside, in the store's own host."""

import contextlib
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import pytest

from safeload.errors import GroupError, IntegrityError, MismatchedCallError, PeerError, SafeLoadError
from tests.ranks import on_ranks, run_on_ranks
from tests.test_faults import (
    ALL_STAGES,
    PEER,
    PEER_STAGES,
    PROMPT_S,
    SOURCE,
    SOURCE_STAGES,
    fault,
    kill,
    leftovers,
    load,
    raise_foreign,
    raise_typed,
    use_temporary_folder,
)
from tests.towers import clip_folder


@pytest.fixture(scope="module")
def tower(tmp_path_factory):
    return clip_folder(tmp_path_factory.mktemp("towers") / "clip")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    import torch
    from safetensors.torch import save_file

    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file({"weight": torch.randn(4, 3), "bias": torch.randn(4)}, path)
    return path


def make_linear(rank, action):
    """A user's factory that does something of its own on one rank."""
    import torch

    def factory():
        if int(os.environ["RANK"]) == rank:
            action()
        return torch.nn.Linear(3, 4)

    return factory


def load_own(weights, factory, **kwargs):
    from safeload import safe_from_pretrained

    options = {"verify": "off", "source_rank": SOURCE, "timeout": timedelta(seconds=30), "device": "cpu"} | kwargs
    return safe_from_pretrained(factory, weights, **options)


def exit_program():
    sys.exit(3)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)


def own_error(error):
    raise error


@on_ranks(3, timeout_s=100)
def test_users_code_that_fails_on_one_rank_only(weights, tmp_path):
    import torch.distributed as dist

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    use_temporary_folder(tmp_path)
    load_own(weights, make_linear(0, str))
    dist.barrier()
    before, me = leftovers(), int(os.environ["RANK"])
    for rank in (SOURCE, PEER, 2):
        for action, own, said in (
            (raise_foreign, PeerError, "ValueError: planted"),
            (exit_program, SystemExit, "SystemExit: 3"),
            (interrupt, KeyboardInterrupt, "KeyboardInterrupt"),
            (lambda: own_error(StopIteration("x")), PeerError, "StopIteration: x"),
        ):
            began = time.monotonic()
            with pytest.raises(own if me == rank else PeerError) as caught:
                load_own(weights, make_linear(rank, action))
            assert time.monotonic() - began < PROMPT_S
            if isinstance(caught.value, PeerError):
                assert said in caught.value.failures[rank], (rank, said)
            dist.barrier()
            del caught
    load_own(weights, make_linear(0, str))
    dist.barrier()
    left = leftovers() - before
    assert not left, left


@on_ranks(3, timeout_s=100)
def test_two_ranks_that_fail_at_once(tower):
    both = (("peer", PEER_STAGES["build"], PEER), ("third", PEER_STAGES["build"], 2))
    for first, second, kind in (
        (raise_typed, raise_foreign, IntegrityError),
        (raise_foreign, raise_typed, IntegrityError),
        (raise_foreign, raise_foreign, PeerError),
    ):
        with contextlib.ExitStack() as faults:
            for action, (_, work, rank) in zip((first, second), both, strict=True):
                faults.enter_context(fault(work, rank, action))
            with pytest.raises(SafeLoadError) as caught:
                load(tower)
        assert type(caught.value) is kind
        if kind is PeerError:
            assert caught.value.failures == {rank: "ValueError: planted" for rank in (PEER, 2)}
    with (
        fault(SOURCE_STAGES["verify"], SOURCE, raise_typed),
        fault(ALL_STAGES["broadcast"], PEER, raise_foreign),
        pytest.raises(SafeLoadError) as caught,
    ):
        load(tower)
    assert "planted" in str(caught.value)
    load(tower)


def end_two(folder, ends, transport):
    """Two ranks of four meet their ends in one load; the others tell what they raised, and how soon."""
    load(folder)
    began = time.monotonic()
    try:
        with contextlib.ExitStack() as faults:
            for work, rank, end in ends:
                faults.enter_context(fault(work, rank, end))
            load(folder, transport=transport)
    except SafeLoadError as error:
        return type(error).__name__, sorted(getattr(error, "failures", {})), time.monotonic() - began
    return None


def kill_here():
    kill(None)


@pytest.mark.parametrize(
    ("stage", "second", "transport"),
    [
        ("place", kill_here, "shared"),
        ("build", raise_foreign, "broadcast"),
        pytest.param("place", kill_here, "broadcast", marks=pytest.mark.slow),
        pytest.param("build", raise_typed, "shared", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_of_which_one_is_killed(stage, second, transport, tower):
    work = PEER_STAGES[stage]
    results = run_on_ranks(4, end_two, tower, [(work, PEER, kill_here), (work, 2, second)], transport)
    assert results[PEER].exit_status == -signal.SIGKILL
    living = [result for result in results if result.exit_status != -signal.SIGKILL]
    assert len(living) == (2 if second is kill_here else 3)
    for result in living:
        assert result.ok, result.describe()
    assert len({result.value[0] for result in living}) == 1
    assert living[0].value[0] == ("IntegrityError" if second is raise_typed else "PeerError")
    if second is not raise_typed:
        assert {tuple(result.value[1]) for result in living} == {(PEER, 2)}
    assert max(result.value[2] for result in living) < PROMPT_S


def lose_the_stores_host(folder, work, rank):
    """Rank 0 serves the store of the process group, and is killed."""
    load(folder)
    began = time.monotonic()
    with fault(work, rank, kill_here), pytest.raises(PeerError) as caught:
        load(folder)
    assert 0 in caught.value.failures, caught.value
    return time.monotonic() - began


@pytest.mark.parametrize("stage", ["build", "place"])
def test_the_host_of_the_store_is_killed(stage, tower):
    assert PEER == 0
    results = run_on_ranks(3, lose_the_stores_host, tower, PEER_STAGES[stage], 0, store="tcp")
    assert results[0].exit_status == -signal.SIGKILL
    for result in results[1:]:
        assert result.ok, result.describe()
        assert result.value < PROMPT_S


def kill_at_random(folder, seed):
    """A rank is killed from a thread at some moment of a series of loads."""
    import random

    random.seed(seed)
    rank = random.randrange(3)
    if int(os.environ["RANK"]) == rank:
        threading.Timer(random.uniform(0.05, 1.5), kill_here).start()
    began = time.monotonic()
    try:
        while time.monotonic() - began < 20:
            began_one = time.monotonic()
            load(folder, transport=("shared", "broadcast")[seed % 2], memory=("sealed", "mapped")[seed // 2 % 2])
    except PeerError as error:
        return sorted(error.failures), time.monotonic() - began_one
    return None


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(each, marks=pytest.mark.slow) for each in range(2, 16))])
def test_a_rank_that_is_killed_at_some_moment(seed, tower):
    results = run_on_ranks(3, kill_at_random, tower, seed, store=("file", "tcp")[seed // 4 % 2])
    killed = [result.rank for result in results if result.exit_status == -signal.SIGKILL]
    assert len(killed) == 1
    for result in results:
        if result.rank not in killed:
            assert result.ok, result.describe()
            failures, seconds = result.value
            assert set(killed) <= set(failures)
            assert seconds < PROMPT_S


def stop_and_go_on(folder):
    """One rank is stopped in mid-load: the others raise at the timeout; it raises the same when it goes on."""
    me, pids = int(os.environ["RANK"]), [None] * 3
    import torch.distributed as dist

    load(folder)
    dist.all_gather_object(pids, os.getpid())
    began = time.monotonic()
    with (
        fault(PEER_STAGES["build"], PEER, lambda: os.kill(os.getpid(), signal.SIGSTOP)),
        pytest.raises(PeerError, match=r"rank 0 silent \(pid \d+ on .*, stopped\)"),
    ):
        load(folder, timeout=timedelta(seconds=2))
    seconds = time.monotonic() - began
    if me == 2:
        os.kill(pids[PEER], signal.SIGCONT)
    load(folder)
    return seconds


def test_a_rank_that_is_stopped(tower):
    results = run_on_ranks(3, stop_and_go_on, tower)
    for result in results:
        assert result.ok, result.describe()
        assert result.rank == PEER or result.value < 2 + 7


@on_ranks(3, timeout_s=60)
def test_some_ranks_load_in_a_group_of_theirs_while_others_do_not(tower):
    import torch.distributed as dist

    some = dist.new_group([2, 0])
    if dist.get_rank() == 1:
        with pytest.raises(GroupError, match="not a member"):
            load(tower, group=some)
        return
    assert load(tower, group=some).training is False
    with fault(SOURCE_STAGES["verify"], 2, raise_typed), pytest.raises(IntegrityError) as caught:
        load(tower, group=some)
    assert caught.value.rank == 2  # source_rank=1 in the group
    load(tower, group=some, transport="shared")


@on_ranks(2, timeout_s=60)
def test_ranks_that_load_others_towers_or_another_number_of_them(tower, weights):
    import torch.distributed as dist

    me = dist.get_rank()
    mine = [lambda: load(tower), lambda: load_own(weights, make_linear(9, str))]
    for first in mine if me else mine[::-1]:
        with pytest.raises(MismatchedCallError) as caught:
            first()
        assert sorted(caught.value.calls) == [0, 1]
    with pytest.raises(MismatchedCallError, match="dtype"):
        load(tower, dtype="bfloat16" if me else None)
    load(tower)
    if me == 0:  # once more than the other
        with pytest.raises(PeerError, match="rank 1 never came") as missed:
            load(tower, timeout=timedelta(seconds=1))
        assert missed.value.failures == {1: "never came"}
    dist.barrier()
    if me == 1:  # when it comes for its next tower, it finds what the other has met
        with pytest.raises(PeerError, match="rank 1 never came"):
            load(tower)
    load(tower)
