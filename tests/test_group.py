"""What a group does when all goes well, on every kind of group there is."""

import os
import threading
import time
import unittest.mock
from datetime import timedelta

import pytest

from safeload.errors import GroupError, IntegrityError, MismatchedCallError, PeerError
from safeload.group import join_group
from tests.ranks import on_ranks

SHORT = timedelta(seconds=20)


def work_through(group=None, source_rank=0, timeout=SHORT):
    """Use everything once; return what this rank saw."""
    import torch

    with join_group(group, source_rank=source_rank, timeout=timeout) as g:
        g.start({"model_class": "CLIPVisionModel", "path": "/towers/clip"})
        value = g.agree("build", lambda: g.rank * 10)
        found = g.on_source("resolve", lambda: "found")
        plan = g.send_bytes("plan", b"\x00plan\xff" if g.is_source else None)
        records = g.gather_bytes("memory", bytes([g.rank]) * g.rank)
        got = []
        payload = [torch.arange(size, dtype=torch.int64).to(torch.uint8) for size in (5, 0, 300_000)]

        def fill(index):
            return payload[index] if g.is_source else torch.full_like(payload[index], 7)

        def take(index, tensor):
            got.append(bool(torch.equal(tensor, payload[index])))

        g.stream("broadcast", [len(each) for each in payload], fill, take)
        return {
            "rank": g.rank,
            "size": g.size,
            "value": value,
            "found": found,
            "plan": plan,
            "records": records,
            "hosts": g.hosts,
            "got": got,
            "source": g.is_source,
            "global_rank": g.global_rank,
        }


def check_worked(seen, *, size, source_rank=0):
    rank = seen["rank"]
    assert seen["size"] == size
    assert seen["value"] == rank * 10
    assert seen["source"] == (rank == source_rank)
    assert seen["found"] == ("found" if seen["source"] else None)
    assert seen["plan"] == b"\x00plan\xff"
    assert seen["records"] == tuple(bytes([each]) * each for each in range(size))
    assert seen["hosts"] == (tuple(range(size)),)
    assert seen["got"] == [True, True, True]


@pytest.mark.parametrize("source_rank", [0, 2])
@on_ranks(3)
def test_a_whole_call_over_a_file_store(source_rank):
    check_worked(work_through(source_rank=source_rank), size=3, source_rank=source_rank)


@on_ranks(2, store="tcp")
def test_many_calls_over_a_tcp_store_leave_no_key_no_thread_and_no_descriptor():
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    store = distributed_c10d._get_process_group_store(dist.group.WORLD)
    work_through()  # gloo makes its connections
    dist.barrier()
    before = (store.num_keys(), threading.active_count(), len(os.listdir("/proc/self/fd")))
    dist.barrier()
    for source_rank in (0, 1, 1):
        check_worked(work_through(source_rank=source_rank), size=2, source_rank=source_rank)
    dist.barrier()
    after = (store.num_keys(), threading.active_count(), len(os.listdir("/proc/self/fd")))
    dist.barrier()
    assert after == before


@on_ranks(4)
def test_sub_groups_side_by_side_with_a_source_that_is_not_global_rank_0():
    import torch.distributed as dist

    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    seen = work_through(groups[rank // 2], source_rank=1)
    check_worked(seen, size=2, source_rank=1)
    assert seen["global_rank"] == rank
    crossed = [dist.new_group([3, 0]), dist.new_group([2, 1])]  # not in rank order
    check_worked(work_through(crossed[0 if rank in (0, 3) else 1]), size=2)


@on_ranks(4)
def test_the_dimensions_of_a_mesh():
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    check_worked(work_through(mesh["shard"]), size=2)
    check_worked(work_through(mesh.get_group("replicate")), size=2)
    with pytest.raises(GroupError, match="mesh of 2 dimensions"):
        join_group(mesh)


@on_ranks(2)
def test_only_members_may_call_and_the_source_must_exist():
    import torch.distributed as dist

    group = dist.new_group([0])
    if dist.get_rank() == 0:
        assert join_group(group).size == 1
    else:
        with pytest.raises(GroupError, match="rank 1 is not a member"):
            join_group(group)
    with pytest.raises(GroupError, match="expected a process group"):
        join_group("world")
    with pytest.raises(GroupError, match="timedelta"), join_group(timeout=30):
        pass
    with pytest.raises(GroupError, match="source_rank is 2"), join_group(source_rank=2):
        pass


@pytest.mark.parametrize(
    "wrong", [{"timeout": 60}, {"timeout": timedelta(0)}, {"source_rank": 5}, {"source_rank": "0"}]
)
@pytest.mark.parametrize("failing", [0, 1])
@on_ranks(2)
def test_a_wrong_argument_on_one_rank_is_told_to_all_at_once(failing, wrong):
    mine = wrong if int(os.environ["RANK"]) == failing else {"timeout": timedelta(minutes=5)}
    began = time.monotonic()
    with pytest.raises(GroupError, match=next(iter(wrong))) as caught, join_group(**mine):
        pass
    assert time.monotonic() - began < 20
    assert caught.value.rank == failing
    check_worked(work_through(), size=2)


@on_ranks(2)
def test_who_is_waited_for_is_said_before_the_time_is_over():
    import logging

    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("safeload").addHandler(handler)
    with unittest.mock.patch("safeload.agreeing._TELL_S", 1.0):
        if os.environ["RANK"] == "1":
            time.sleep(4)
        check_worked(work_through(), size=2)
    assert any("waiting for rank 1, for up to" in text for text in told) == (os.environ["RANK"] == "0")


@on_ranks(2, backend="cpu:gloo,cuda:gloo")
def test_a_group_with_a_backend_for_each_device():
    check_worked(work_through(), size=2)
    assert join_group().devices == ("cpu", "cuda")


def test_no_process_group_is_a_group_of_one():
    with join_group() as g:
        assert (g.rank, g.size, g.is_source, g.hosts) == (0, 1, True, ((0,),))
    check_worked(work_through(), size=1)
    with pytest.raises(PeerError, match="ValueError: no") as caught, join_group() as g:
        g.agree("build", lambda: _raise(ValueError("no")))
    assert caught.value.failures == {0: "ValueError: no"}
    assert isinstance(caught.value.__cause__, ValueError)


def test_ranks_without_a_process_group_are_told_how_to_get_one(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match="init_process_group"):
        assert join_group().size == 1


def _raise(error):
    raise error


@on_ranks(2, store="tcp")
def test_without_the_private_store_the_members_make_their_own():
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    from safeload import wiring

    del distributed_c10d._get_process_group_store
    assert wiring.private_store(dist.group.WORLD) is None
    check_worked(work_through(), size=2)
    check_worked(work_through(source_rank=1), size=2, source_rank=1)


@on_ranks(2)
def test_the_private_store_is_where_this_version_of_torch_has_it():
    import torch.distributed as dist

    from safeload import wiring

    assert wiring.private_store(dist.group.WORLD) is not None


@pytest.mark.slow  # the whole pipeline has a test of its own
@on_ranks(2, group_timeout_s=5, timeout_s=40)
def test_a_source_slower_than_the_process_groups_own_timeout():
    with join_group(timeout=timedelta(seconds=30)) as g:
        g.on_source("verify", lambda: time.sleep(7))
        g.agree("build", lambda: time.sleep(0 if g.is_source else 6))
    check_worked(work_through(), size=2)


@on_ranks(2)
def test_a_tower_made_of_towers():
    with join_group(timeout=SHORT) as g:
        g.agree("build", lambda: check_worked(work_through(), size=2))


@on_ranks(2)
def test_a_load_inside_of_work_that_only_the_source_does_is_refused_at_once():
    with pytest.raises(GroupError, match="only the source does"), join_group(timeout=SHORT) as g:
        g.on_source("build", work_through)
    check_worked(work_through(), size=2)


@on_ranks(2)
def test_two_threads_load_one_after_another():
    seen = []
    threads = [threading.Thread(target=lambda: seen.append(work_through())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 2
    for each in seen:
        check_worked(each, size=2)


@on_ranks(2)
def test_another_threads_load_is_not_waited_for_for_ever():
    holds, done = threading.Event(), threading.Event()

    def load():
        with join_group(timeout=SHORT):
            holds.set()
            done.wait()

    thread = threading.Thread(target=load)
    thread.start()
    holds.wait()
    with pytest.raises(GroupError, match="another thread"), join_group(timeout=timedelta(seconds=0.5)):
        pass
    done.set()
    thread.join()


@on_ranks(3)
def test_a_typed_error_keeps_class_and_data_on_every_rank_and_the_group_works_again():
    def verify():
        if g.rank == 1:
            raise IntegrityError("bad bytes", path="model.safetensors", expected="aa", actual="bb")

    with pytest.raises(IntegrityError) as caught, join_group(timeout=SHORT) as g:
        g.agree("verify", verify)
    error = caught.value
    assert (error.rank, error.stage, error.path, error.expected) == (1, "verify", "model.safetensors", "aa")
    assert error.host == os.uname().nodename
    assert isinstance(error.__cause__, IntegrityError) == (g.rank == 1)
    check_worked(work_through(), size=3)


@on_ranks(3)
def test_several_foreign_errors_are_one_peer_error():
    def build():
        if g.rank:
            raise ValueError(f"words of {g.rank}")

    with pytest.raises(PeerError) as caught, join_group(timeout=SHORT) as g:
        g.agree("build", build)
    assert caught.value.failures == {1: "ValueError: words of 1", 2: "ValueError: words of 2"}
    assert caught.value.stage == "build"
    check_worked(work_through(), size=3)


@on_ranks(3)
def test_a_typed_error_goes_before_foreign_ones_of_lower_ranks():
    errors = [KeyError("x"), MemoryError(), IntegrityError("bad")]
    with pytest.raises(IntegrityError) as caught, join_group(timeout=SHORT) as g:
        g.agree("build", lambda: _raise(errors[g.rank]))
    assert caught.value.rank == 2


@pytest.mark.parametrize("failing", [0, 1])
@on_ranks(2)
def test_an_error_between_the_stages_reaches_everybody(failing):

    def load():
        with join_group(timeout=SHORT) as g:
            g.agree("build", lambda: None)
            if g.rank == failing:
                _ = 1 / 0
            g.on_source("seal", lambda: None)
            g.send_bytes("plan", b"")
            g.agree("place", lambda: None)

    with pytest.raises(PeerError, match="ZeroDivisionError") as caught:
        load()
    assert caught.value.rank == failing
    check_worked(work_through(), size=2)


@pytest.mark.parametrize("failing", [0, 1])
@on_ranks(2)
def test_an_error_at_the_very_end_lets_nobody_out(failing):

    def load():
        with join_group(timeout=SHORT) as g:
            g.agree("place", lambda: None)
            if g.rank == failing:
                raise RuntimeError("late")

    with pytest.raises(PeerError, match="late") as caught:
        load()
    assert caught.value.rank == failing


@pytest.mark.parametrize("failing", [0, 1])
@on_ranks(2)
def test_different_calls_are_shown_from_both_sides(failing):
    path = "/towers/siglip" if int(os.environ["RANK"]) == failing else "/towers/clip"
    with pytest.raises(MismatchedCallError) as caught, join_group(timeout=SHORT) as g:
        g.start({"model_class": "CLIPVisionModel", "path": path})
    assert caught.value.calls == {failing: "path=/towers/siglip", 1 - failing: "path=/towers/clip"}
    assert "model_class" not in str(caught.value)
    check_worked(work_through(), size=2)


@on_ranks(3)
def test_different_sources_are_a_mismatch():
    with pytest.raises(MismatchedCallError, match="source_rank=2"):
        work_through(source_rank=(1, 1, 2)[int(os.environ["RANK"])])
    check_worked(work_through(), size=3)


@on_ranks(2)
def test_another_order_of_towers_is_a_mismatch_and_the_ranks_stay_in_step():
    towers = ["clip", "dino"] if os.environ["RANK"] == "0" else ["dino", "clip"]
    for tower in towers:
        with pytest.raises(MismatchedCallError), join_group(timeout=SHORT) as g:
            g.start({"path": tower})
    check_worked(work_through(), size=2)


@on_ranks(2)
def test_a_rank_that_comes_late_finds_the_failure_and_is_in_step():
    if os.environ["RANK"] == "1":
        time.sleep(2)
    with pytest.raises(PeerError) as caught, join_group(timeout=timedelta(seconds=1)) as g:
        g.agree("build", lambda: None)
    assert caught.value.failures == {1: "never came"}
    assert "within 1 s" in str(caught.value)
    check_worked(work_through(), size=2)


@on_ranks(2)
def test_a_first_rank_that_comes_late_finds_the_failure_and_is_in_step():
    if os.environ["RANK"] == "0":
        time.sleep(4)  # the others wait 2 s longer than the judge would
    with pytest.raises(PeerError) as caught, join_group(timeout=timedelta(seconds=1)) as g:
        g.agree("build", lambda: None)
    assert caught.value.failures == {0: "never came"}
    check_worked(work_through(), size=2)


def stream_with(g, fail_at=None, failing=None, buckets=6):
    import torch

    scrap = torch.zeros(1000, dtype=torch.uint8)

    def take(index, tensor):
        if index == fail_at and g.rank == failing:
            raise OSError("no space left")

    g.stream("broadcast", [1000] * buckets, lambda index: scrap, take)


@pytest.mark.parametrize("failing", [0, 1, 2])
@on_ranks(3)
def test_a_failure_in_the_payload_stops_all_in_step(failing, monkeypatch):
    from safeload import transferring

    transferring._WINDOW_BYTES = 1000
    with pytest.raises(PeerError, match="no space left") as caught, join_group(timeout=SHORT) as g:
        stream_with(g, fail_at=2, failing=failing, buckets=400)
    assert caught.value.rank == failing
    assert caught.value.stage == "broadcast"
    check_worked(work_through(), size=3)


@on_ranks(2)
def test_a_bucket_of_the_wrong_kind_is_refused_on_every_rank():
    import torch

    kinds = {True: torch.float32, False: torch.uint8}
    with pytest.raises(GroupError, match="contiguous uint8"), join_group(timeout=SHORT) as g:
        g.stream("broadcast", [8], lambda _: torch.zeros(8, dtype=kinds[g.is_source]), lambda index, tensor: None)
    check_worked(work_through(), size=2)
