"""Faults in the whole pipeline: each stage, on the source and on another rank, by each kind of fault.

The exceptions run one after another in one process group, which has to load again after each of them. What kills a
process runs in a group of its own.
"""

import contextlib
import ctypes
import gc
import os
import re
import resource
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest

from safeload.errors import IntegrityError, MismatchedCallError, SafeLoadError
from tests.ranks import on_ranks, run_on_ranks
from tests.towers import clip_folder

PROMPT_S = 10.0
SOURCE, PEER = 1, 0  # the source is not rank 0 here
SOURCE_STAGES = {  # stage as errors name it: what does its work
    "resolve": "safeload.loading.resolve",
    "expect": "safeload.loading.expect",
    "seal": "safeload.filling.copy_hashed",
    "verify": "safeload.sourcing.verify",
    "examine": "safeload.sourcing.examine",
    "build": "safeload.sourcing.build_source",
    "plan": "safeload.deferring.plan",
}
PEER_STAGES = {
    "plan": "safeload.calling.Letter.from_json",
    "build": "safeload.delivering.build_peer",
    "allocate": "safeload.delivering.allocate",
    "place": "safeload.delivering.place",
}
ALL_STAGES = {
    "arguments": "safeload.requesting.Request.check",
    "device": "safeload.delivering._device",
    "broadcast": "safeload.broadcasting._copy",
    "protect": "safeload.loading.protect",
}
TABLE = [
    *((stage, work, SOURCE) for stage, work in (SOURCE_STAGES | ALL_STAGES).items()),
    *((stage, work, PEER) for stage, work in (PEER_STAGES | ALL_STAGES).items()),
]


@pytest.fixture(scope="module")
def tower(tmp_path_factory):
    return clip_folder(tmp_path_factory.mktemp("towers") / "clip")


def load(folder, **kwargs):
    from transformers import CLIPVisionModel

    from safeload.loading import safe_from_pretrained

    options = {"verify": "off", "source_rank": SOURCE, "timeout": timedelta(seconds=30), "device": "cpu"}
    options |= {"transport": "broadcast"} | kwargs
    return safe_from_pretrained(CLIPVisionModel, folder, **options)


@contextlib.contextmanager
def fault(work, rank, action):
    """Run `action` where `work` begins, on one rank."""
    if int(os.environ["RANK"]) != rank:
        yield
        return
    owner, name = _find(work)
    original = getattr(owner, name)

    def faulty(*args, **kwargs):
        action()
        return original(*args, **kwargs)

    with mock.patch.object(owner, name, faulty):
        yield


def _find(work):
    import importlib

    parts = work.split(".")
    owner = importlib.import_module(".".join(parts[:2]))
    for part in parts[2:-1]:
        owner = getattr(owner, part)
    return owner, parts[-1]


def use_temporary_folder(tmp_path):
    """Give this rank a folder of its own for temporary files, so that each can be accounted for."""
    own = tmp_path / f"temporary-{os.environ['RANK']}"
    own.mkdir()
    tempfile.tempdir = str(own)


def leftovers():
    """Count what a load could leave behind: threads, descriptors, sealed memory, shared memory, temporary files."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return Counter(
        [
            *(f"thread {thread.name}" for thread in threading.enumerate()),
            *_descriptors(),
            *(line.split()[-2] for line in maps.splitlines() if "memfd:" in line),
            *(f"shared {name}" for name in os.listdir("/dev/shm") if "safeload" in name or "torch" in name),
            *(f"temporary {name}" for name in os.listdir(tempfile.gettempdir())),
        ]
    )


def _descriptors():
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            yield os.readlink(f"/proc/self/fd/{fd}").partition(":[")[0]


def raise_typed():
    raise IntegrityError("planted", path="model.safetensors", expected="aa", actual="bb")


def raise_foreign():
    raise ValueError("planted")


SHARED_TABLE = [row for row in TABLE if row[0] not in ("allocate", "broadcast")]
SHARED_TABLE += [("share", "safeload.delivering.take_over", PEER)]
SHARED_TABLE += [("share", "safeload.sharing.Answer.to_json", rank) for rank in (SOURCE, PEER)]


@pytest.mark.parametrize(
    ("kind", "transport", "table"),
    [
        ("typed", "broadcast", TABLE),
        ("foreign", "shared", SHARED_TABLE),
        pytest.param("foreign", "broadcast", TABLE, marks=pytest.mark.slow),
        pytest.param("typed", "shared", SHARED_TABLE, marks=pytest.mark.slow),
    ],
)
@on_ranks(3, timeout_s=100)
def test_an_exception_in_any_stage_on_any_rank(kind, transport, table, tower, tmp_path):
    import torch.distributed as dist

    use_temporary_folder(tmp_path)
    load(tower, transport=transport)
    dist.barrier()
    before = leftovers()
    action = raise_typed if kind == "typed" else raise_foreign
    for stage, work, rank in table:
        at = f"{stage} on rank {rank}"
        began = time.monotonic()
        with (
            pytest.raises(SafeLoadError) as caught,
            fault(work, rank, action),
        ):
            load(tower, transport=transport)
        error = caught.value
        assert time.monotonic() - began < PROMPT_S, at
        assert type(error).__name__ == ("IntegrityError" if kind == "typed" else "PeerError"), (at, error)
        assert (error.rank, error.host, error.stage) == (rank, os.uname().nodename, stage), (at, error)
        assert "planted" in str(error), at
        if kind == "typed":
            assert (error.path, error.expected, error.actual) == ("model.safetensors", "aa", "bb")
        else:
            assert error.failures == {rank: "ValueError: planted"}, at
        del error, caught
    load(tower, transport=transport)
    dist.barrier()
    left = leftovers() - before
    assert not left, left


def meet_end(tmp_path, folder, planned, options=None):
    """Load with a fault that ends a process; tell class, rank named, text, seconds since, and what was left."""
    work, rank, end = planned
    use_temporary_folder(tmp_path)
    load(folder)
    before = leftovers()
    mark = tmp_path / "when"

    def action():
        mark.with_suffix(".new").write_text(str(time.monotonic()))
        mark.with_suffix(".new").rename(mark)
        end(folder)

    try:
        with fault(work, rank, action):
            load(folder, **(options or {}))
    except SafeLoadError as error:
        since = time.monotonic() - float(mark.read_text())
        seen = {"class": type(error).__name__, "rank": error.rank, "text": str(error), "seconds": since}
        seen["failures"] = getattr(error, "failures", None)
        del error
    else:
        return "no error"
    connections = {"socket", "anon_inode"}  # a process group with a dead member keeps some until it is destroyed
    return seen | {"left": sorted(name for name in leftovers() - before if name not in connections)}


def kill(folder):
    os.kill(os.getpid(), signal.SIGKILL)


def truncate(folder):
    """Make the mapped file shorter: the next page that is touched is not there."""
    os.truncate(folder / "model.safetensors", 4096)


def be_killed_for_memory(folder):
    """Take more memory than this process's control group may have: the kernel kills it, nothing can be caught."""
    group = Path(os.environ["MEMORY_GROUP"])
    limit = next(group / name for name in ("memory.max", "memory.limit_in_bytes") if (group / name).exists())
    limit.write_text(str(32 * 1024**2))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    kept = bytearray(512 * 1024**2)
    for page in range(0, len(kept), 4096):
        kept[page] = 1
    raise AssertionError("the limit did not hold")


@pytest.fixture
def memory_group(tmp_path):
    """Make a control group for memory, of either version; skip where that is not permitted."""
    for root in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")):
        group = root / f"safeload-{os.getpid()}"
        with contextlib.suppress(OSError):
            group.mkdir()
            if (group / "memory.limit_in_bytes").exists() or (group / "memory.max").exists():
                yield group
                group.rmdir()
                return
            group.rmdir()
    pytest.skip("no control group for memory can be made here")


def large_tower(folder):
    """Write a tower for which a rank asks the system: 50 MB never fit into what the process has at hand."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8}
    CLIPVisionModel(CLIPVisionConfig(image_size=64, **sizes)).save_pretrained(folder)
    return folder


def leave_no_room(folder):
    """Leave this process 1 MiB: the tower that comes next can not be allocated, nor mapped."""
    with open("/proc/self/statm") as statm:
        used_bytes = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + 1024**2, resource.RLIM_INFINITY))


def check_survivors(results, rank):
    for result in results:
        if result.rank == rank:
            continue
        assert result.ok, result.describe()
        seen = result.value
        assert seen["class"] == "PeerError", seen
        assert seen["rank"] == rank, seen
        assert f"rank {rank} lost" in seen["text"], seen
        assert f"on {os.uname().nodename}) has ended" in seen["text"], seen
        assert seen["seconds"] < PROMPT_S, seen
        assert seen["left"] == [], seen


SHORT_TABLE = [("seal", SOURCE), ("build", PEER), ("broadcast", SOURCE), ("broadcast", PEER)]


def _killed(stage, work, rank):
    marks = [] if (stage, rank) in SHORT_TABLE else [pytest.mark.slow]
    return pytest.param(stage, work, rank, marks=marks, id=f"{stage}-{'source' if rank == SOURCE else 'peer'}")


@pytest.mark.parametrize(("stage", "work", "rank"), [_killed(*row) for row in TABLE])
def test_a_killed_rank_in_any_stage(stage, work, rank, tower, tmp_path):
    results = run_on_ranks(3, meet_end, tmp_path, tower, (work, rank, kill))
    assert results[rank].exit_status == -signal.SIGKILL
    check_survivors(results, rank)


ALL_MAPPED = "safeload.loading.install_boundary_errors"  # the last work of all, when this rank needs no other mapping


def use_what_is_gone(folder):
    """Touch memory of the tower behind the file's new end, as any use of the tower would."""
    truncate(folder)
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("model.safetensors"):
            ctypes.string_at(int(line.split("-")[0], 16) + 8192, 1)
    raise AssertionError("the file was mapped nowhere")


@pytest.mark.parametrize(
    ("transport", "work", "rank", "end"),
    [
        ("broadcast", ALL_STAGES["broadcast"], SOURCE, truncate),  # the next thing is to send what was hashed
        ("shared", ALL_MAPPED, PEER, use_what_is_gone),
        ("shared", ALL_MAPPED, SOURCE, use_what_is_gone),
    ],
)
def test_a_mapped_file_made_shorter_when_it_is_used(transport, work, rank, end, tmp_path):
    own = clip_folder(tmp_path / "tower")
    results = run_on_ranks(3, meet_end, tmp_path, own, (work, rank, end), {"memory": "mapped", "transport": transport})
    assert results[rank].exit_status == -signal.SIGBUS, results[rank].describe()
    for result in results:
        if result.rank == rank:
            continue
        assert result.ok, result.describe()
        seen = result.value
        assert seen["left"] == [], seen
        assert seen["seconds"] < PROMPT_S, seen
        if seen["class"] == "SourceError":  # another rank came to map the file, and found it short
            assert "4096 bytes now, 326400 when it was opened" in seen["text"]
        else:
            assert seen["class"] == "PeerError", seen
            assert seen["failures"].keys() == {rank}, seen
            assert f"on {os.uname().nodename}) has ended" in seen["failures"][rank], seen
    assert len({result.value["class"] for result in results if result.rank != rank}) == 1


def test_a_mapped_file_made_shorter_while_it_is_read(tmp_path):
    own = clip_folder(tmp_path / "tower")
    planned = (SOURCE_STAGES["plan"], SOURCE, truncate)
    for result in run_on_ranks(3, meet_end, tmp_path, own, planned, {"memory": "mapped", "transport": "shared"}):
        assert result.ok, result.describe()
        assert result.value["class"] == "SourceError", result.value
        assert "something writes to it" in result.value["text"]  # who notices first, the reader or who maps, says so
        assert result.value["seconds"] < PROMPT_S
        assert result.value["left"] == [], result.value


def test_a_mapped_file_made_shorter_before_the_loader_opens_it(tmp_path):
    own = clip_folder(tmp_path / "tower")
    planned = (SOURCE_STAGES["examine"], SOURCE, truncate)
    for result in run_on_ranks(3, meet_end, tmp_path, own, planned, {"memory": "mapped"}):
        assert result.ok, result.describe()
        assert result.value["class"] in ("CheckpointError", "SourceError")
        assert result.value["rank"] == SOURCE


@pytest.mark.parametrize(("work", "rank"), [(PEER_STAGES["allocate"], PEER), (SOURCE_STAGES["build"], SOURCE)])
def test_a_rank_without_memory_left(work, rank, tmp_path):
    results = run_on_ranks(3, meet_end, tmp_path, large_tower(tmp_path / "large"), (work, rank, leave_no_room))
    for result in results:
        assert result.ok, result.describe()
        assert result.value["class"] == "PeerError"
        assert result.value["rank"] == rank
        assert re.search("MemoryError|[Cc]an.?not allocate memory|can't allocate memory", result.value["text"]), (
            result.value
        )
        assert result.value["seconds"] < PROMPT_S


@pytest.mark.parametrize("rank", [SOURCE, PEER])
def test_a_rank_that_the_kernel_kills_for_its_memory(rank, tower, tmp_path, memory_group):
    work = {SOURCE: SOURCE_STAGES["build"], PEER: PEER_STAGES["allocate"]}[rank]
    planned, env = (work, rank, be_killed_for_memory), {"MEMORY_GROUP": str(memory_group)}
    results = run_on_ranks(3, meet_end, tmp_path, tower, planned, env=env)
    assert results[rank].exit_status == -signal.SIGKILL, results[rank].describe()
    check_survivors(results, rank)


@on_ranks(2, group_timeout_s=5, timeout_s=60)
def test_a_source_of_12_s_in_a_process_group_whose_timeout_is_5_s(tower):
    began = time.monotonic()
    slow_source = fault(SOURCE_STAGES["seal"], SOURCE, lambda: time.sleep(12))
    slow_peer = fault(PEER_STAGES["build"], PEER, lambda: time.sleep(6))
    with slow_source, slow_peer:
        load(tower)
    assert time.monotonic() - began > 12  # the peer builds while the source reads


def _silent(stage, work, rank):
    marks = [] if (stage, rank) in [("seal", SOURCE), ("build", PEER)] else [pytest.mark.slow]
    return pytest.param(stage, work, rank, marks=marks, id=f"{stage}-{'source' if rank == SOURCE else 'peer'}")


@pytest.mark.parametrize(("stage", "work", "rank"), [_silent(*row) for row in TABLE])
@on_ranks(2)
def test_work_that_does_not_end_in_time(stage, work, rank, tower):
    began = time.monotonic()
    naps_s = iter([7])  # once: some work is done tensor by tensor
    with fault(work, rank, lambda: time.sleep(next(naps_s, 0))), pytest.raises(SafeLoadError) as caught:
        load(tower, timeout=timedelta(seconds=2))
    assert type(caught.value).__name__ == "PeerError"
    assert "within 2 s" in str(caught.value)
    assert rank in caught.value.failures
    in_threads = stage in ("resolve", "expect", "seal")  # the source need not wait for them
    if int(os.environ["RANK"]) != rank or in_threads:
        assert time.monotonic() - began < 2 + 7  # the timeout, the margin for the source's word, and a slow machine
    if stage != "broadcast":  # there a collective had to be abandoned: the process group is spent
        load(tower)


def read_for_long(folder):
    """Read in chunks of 3 s each on the source, while the other rank dies after one second."""
    if int(os.environ["RANK"]) == PEER:
        threading.Timer(1.0, kill, [folder]).start()
    with mock.patch("safeload.filling.freeze") as finished:
        with fault("safeload.sealing.Progress.add", SOURCE, lambda: time.sleep(3)), pytest.raises(SafeLoadError):
            load(folder)
        return finished.call_count


def test_reading_stops_when_another_rank_is_lost(tower):
    results = run_on_ranks(2, read_for_long, tower)
    assert results[SOURCE].ok, results[SOURCE].describe()
    assert results[SOURCE].value == 0  # the weights were not read to their end
    assert results[SOURCE].seconds < PROMPT_S


@on_ranks(4)
def test_each_dimension_of_a_mesh_loads_its_own(tower):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for name in ("replicate", "shard"):
        assert load(tower, group=mesh[name]).training is False


@pytest.fixture(scope="module")
def other(tower):
    return shutil.copytree(tower, tower.with_name("other"))


@on_ranks(2)
def test_two_threads_load_or_are_refused(tower, other):
    """Which thread comes first may differ from rank to rank: then both ranks are told so, and nobody hangs."""
    got = {}

    def load_in_thread(name, folder):
        try:
            got[name] = load(folder)
        except MismatchedCallError as error:
            got[name] = error

    for folders in ([tower, tower], [tower, other]):
        threads = [threading.Thread(target=load_in_thread, args=pair) for pair in enumerate(folders)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if folders[0] == folders[1]:
            assert all(hasattr(each, "parameters") for each in got.values()), got
    assert load(tower).training is False


@on_ranks(2)
def test_a_group_of_one_rank_loads_for_itself_beside_the_others(tower):
    import torch.distributed as dist

    alone = [dist.new_group([rank]) for rank in (0, 1)]
    assert load(tower, group=alone[dist.get_rank()], source_rank=0).training is False
    load(tower)


def register_stand_in(rank):
    """Have a backend for cuda that is no part of torch, as NCCL is none in a build for the cpu."""
    import torch.distributed as dist

    def create(store, rank, size, timeout):
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    dist.Backend.register_backend("standin", create, devices=["cuda"])


def load_in_groups_for_gpus(folder):
    from safeload.group import join_group

    seen = [join_group().devices]
    for transport in ("broadcast", "shared"):
        try:
            load(folder, transport=transport)
        except SafeLoadError as error:
            seen.append(type(error).__name__)
        else:
            seen.append("loaded")
    return seen


@pytest.mark.parametrize(
    ("backend", "seen"),
    [
        ("cpu:gloo,cuda:standin", [("cpu", "cuda"), "loaded", "loaded"]),
        # no collective for the cpu, and no GPU here to send by: an error on every rank; sharing needs no collective
        ("cuda:standin", [("cuda",), "PeerError", "loaded"]),
    ],
)
def test_groups_with_a_backend_for_gpus(backend, seen, tower):
    for result in run_on_ranks(2, load_in_groups_for_gpus, tower, backend=backend, before=register_stand_in):
        assert result.ok, result.describe()
        assert result.value == seen
