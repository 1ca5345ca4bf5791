"""The harness itself: a rank that fails, hangs, crashes or leaves early makes its test fail."""

import os
import signal
import sys
import time
import warnings
from pathlib import Path

import psutil
import pytest

from tests.ranks import RanksFailed, on_ranks, run_on_ranks


@on_ranks(2)
def test_a_test_runs_in_every_rank_of_one_group(tmp_path):
    import torch
    import torch.distributed as dist

    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    assert total.item() == 3
    assert os.environ["RANK"] == str(dist.get_rank()) == os.environ["LOCAL_RANK"]
    assert os.environ["WORLD_SIZE"] == "2"
    assert torch.get_num_threads() == 1
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["0", "1"]


@on_ranks(3, store="tcp")
def test_a_group_over_a_tcp_store():
    import torch.distributed as dist

    dist.barrier()
    assert dist.get_world_size() == 3


@pytest.mark.parametrize("word", ["one", "two"])
@on_ranks(2)
def test_parameters_reach_the_ranks(word):
    assert word in ("one", "two")


@on_ranks(2, store="none", env=lambda rank: {"WHO": f"rank {rank}"})
def test_an_environment_of_its_own_for_each_rank_and_no_group():
    import torch.distributed as dist

    assert not dist.is_initialized()
    assert os.environ["WHO"] == f"rank {os.environ['RANK']}"


class TestInAClass:
    @on_ranks(2)
    def test_methods_work_as_well(self):
        import torch.distributed as dist

        assert dist.get_world_size() == 2


@on_ranks(2)
def raises_on_one_rank():
    if os.environ["RANK"] == "1":
        raise ValueError("the words of rank 1")


@on_ranks(2)
def raises_while_the_other_waits():
    import torch.distributed as dist

    if os.environ["RANK"] == "1":
        raise ValueError("the words of rank 1")
    dist.barrier()


@on_ranks(2, timeout_s=3)
def hangs_on_one_rank():
    if os.environ["RANK"] == "1":
        time.sleep(60)


@on_ranks(2)
def leaves_early():
    if os.environ["RANK"] == "1":
        sys.exit(0)


@on_ranks(2)
def leaves_early_and_hard():
    if os.environ["RANK"] == "1":
        os._exit(0)


@on_ranks(2)
def is_killed():
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)


@on_ranks(2)
def crashes():
    import ctypes

    if os.environ["RANK"] == "1":
        ctypes.string_at(0)


@on_ranks(2)
def warns():
    warnings.warn("a warning of our own", UserWarning, stacklevel=1)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (raises_on_one_rank, "ValueError: the words of rank 1"),
        (raises_while_the_other_waits, "ValueError: the words of rank 1"),
        (hangs_on_one_rank, "did not end in time"),
        (leaves_early, "SystemExit"),
        (leaves_early_and_hard, "ended before its function returned, exit status 0"),
        (is_killed, f"exit status -{signal.SIGKILL.value}"),
        (crashes, f"exit status -{signal.SIGSEGV.value}"),
        (warns, "UserWarning: a warning of our own"),
    ],
)
def test_a_bad_rank_makes_the_test_fail(body, words):
    with pytest.raises(RanksFailed) as caught:
        body()
    assert words in str(caught.value)
    assert "rank 1" in str(caught.value)


def test_a_hanging_rank_shows_where_it_hangs():
    with pytest.raises(RanksFailed, match="in hangs_on_one_rank"):
        hangs_on_one_rank()


def gives_its_rank(base):
    print("said by the rank")
    if os.environ["RANK"] == "2":
        os.kill(os.getpid(), signal.SIGKILL)
    if os.environ["RANK"] == "1":
        raise KeyError("x")
    return base + int(os.environ["RANK"])


def test_results_tell_how_each_rank_ended():
    first, second, third = run_on_ranks(3, gives_its_rank, 10, store="none")
    assert first.ok
    assert first.value == 10
    assert first.output == "said by the rank\n"
    assert not second.ok
    assert isinstance(second.error, KeyError)
    assert not third.ok
    assert third.exit_status == -signal.SIGKILL


def gives_its_pid():
    return os.getpid()


def stays(folder):
    Path(folder, str(os.getpid())).touch()
    time.sleep(60)


def test_no_process_and_no_folder_stays(tmp_path):
    results = run_on_ranks(2, stays, tmp_path, store="none", timeout_s=2)
    assert [result.late for result in results] == [True, True]
    pids = [int(each.name) for each in tmp_path.iterdir()]
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_rank_test_starts_in_well_under_a_second():
    run_on_ranks(2, gives_its_pid)
    best = min(_seconds_of_a_run() for _ in range(3))
    assert best < 1.0


def _seconds_of_a_run():
    began = time.monotonic()
    assert all(result.ok for result in run_on_ranks(2, gives_its_pid))
    return time.monotonic() - began


def test_a_local_function_is_refused():
    def local():
        pass

    (result,) = run_on_ranks(1, local, store="none")
    assert not result.ok
    assert "must be at module level" in result.output
