"""Many hosts: network namespaces, each with its own address, name and files."""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest

from benchmarks.scale import make_tower
from safeload.errors import SafeLoadError
from tests.hosts import hosts
from tests.ranks import run_on_ranks
from tests.towers import clip_folder

PROMPT_S = 10.0
_PORT = 29511  # each host has all ports to itself


@pytest.fixture
def folder(tmp_path):
    return clip_folder(tmp_path / "towers" / "clip")


def load(folder, **kwargs):
    from transformers import CLIPVisionModel

    from safeload.loading import safe_from_pretrained

    options = {"verify": "off", "timeout": timedelta(seconds=60), "device": "cpu"} | kwargs
    return safe_from_pretrained(CLIPVisionModel, folder, **options)


def digest(tower):
    whole = hashlib.sha256()
    for name, tensor in sorted({**dict(tower.named_parameters()), **dict(tower.named_buffers())}.items()):
        whole.update(name.encode() + tensor.detach().contiguous().view(-1).numpy().tobytes())
    return whole.hexdigest()


def load_here(folder, source_rank):
    from safeload.group import join_group
    from safeload.loading import load_report

    tower = load(folder, source_rank=source_rank)
    with join_group(timeout=timedelta(seconds=20)) as group:
        return {
            "digest": digest(tower),
            "hosts": group.hosts,
            "host": group.host,
            "report": [(each.rank, each.host, bool(each.files_opened)) for each in load_report(tower).ranks],
            "files": Path(folder).exists() and len(os.listdir(folder)),
        }


def check(results, *, layout, source_rank):
    for result in results:
        assert result.ok, result.describe()
    seen = [result.value for result in results]
    assert len({each["digest"] for each in seen}) == 1
    expected = tuple(tuple(rank for rank, host in enumerate(layout) if host == each) for each in dict.fromkeys(layout))
    assert {each["hosts"] for each in seen} == {expected}
    assert [each["host"] for each in seen] == [f"host{host}" for host in layout]
    assert seen[0]["report"] == [(rank, f"host{host}", rank == source_rank) for rank, host in enumerate(layout)]
    for each, host in zip(seen, layout, strict=True):
        assert bool(each["files"]) == (host == layout[source_rank])


@pytest.mark.parametrize(
    ("layout", "source_rank"),
    [
        ([0, 0, 1, 1], 0),
        ([0, 1, 2, 0, 1, 2], 4),  # LOCAL_RANK does not follow the ranks
        pytest.param([0, 0, 1, 1, 2, 2], 5, marks=pytest.mark.slow),
    ],
)
def test_only_the_sources_host_has_the_files(layout, source_rank, folder):
    with hosts(max(layout) + 1) as cluster:
        options = cluster.options(host_of=layout, hidden=folder.parent, seen_by=layout[source_rank])
        results = run_on_ranks(len(layout), load_here, folder, source_rank, **options)
    check(results, layout=layout, source_rank=source_rank)


def test_a_slow_link_that_loses_packets(folder):
    with hosts(2) as cluster:
        cluster.slow_down(0, rate="20mbit", limit_bytes=20_000)
        options = cluster.options(ranks_per_host=1, hidden=folder.parent)
        results = run_on_ranks(2, load_here, folder, 0, **options)
        assert cluster.dropped_packets(0) > 0
    check(results, layout=[0, 1], source_rank=0)


def load_and_count(tower, cluster, transport):
    """Load twice, and count what each host's link received the second time, when all connections are there."""
    import torch.distributed as dist
    from transformers import CLIPVisionModel

    from safeload import load_report, safe_from_pretrained

    for _ in range(2):
        dist.barrier()
        before = [cluster.received_bytes(host) for host in (0, 1)]
        dist.barrier()
        module = safe_from_pretrained(CLIPVisionModel, tower, device="cpu", verify="off", transport=transport)
        dist.barrier()
        received = [cluster.received_bytes(host) - each for host, each in enumerate(before)]
    report = load_report(module)
    return {
        "received": received[1],
        "tower": report.tower_bytes,
        "transport": report.transport,
        "digest": digest(module),
    }


@pytest.mark.parametrize(("transport", "copies"), [("auto", 1), ("broadcast", 2)])
def test_how_often_a_host_of_two_ranks_receives_the_bytes(transport, copies, tmp_path):
    tower = make_tower(tmp_path / "towers" / "large")
    with hosts(2) as cluster:
        options = cluster.options(ranks_per_host=2, hidden=tower.parent)
        results = run_on_ranks(4, load_and_count, tower, cluster, transport, **options)
    for result in results:
        assert result.ok, result.describe()
    seen = [result.value for result in results]
    assert len({each["digest"] for each in seen}) == 1
    assert {each["transport"] for each in seen} == {"shared" if transport == "auto" else "broadcast"}
    assert copies * 0.99 < seen[0]["received"] / seen[0]["tower"] < copies * 1.15


def lose_a_host(folder, cluster, work, lost):
    """Load while one host is cut off at a stage on the source; tell what was raised and when."""
    mark = Path("/tmp") / cluster.names[0]
    load(folder)
    original = _resolve(work)

    def cutting(*args, **kwargs):
        if os.environ["RANK"] == "0" and not mark.exists():
            mark.write_text(str(time.monotonic()))
            cluster.cut(lost)
        return original(*args, **kwargs)

    began = time.monotonic()
    try:
        with mock.patch(work, cutting):
            load(folder)
    except SafeLoadError as error:
        when = float(mark.read_text()) if mark.exists() else began
        return {
            "class": type(error).__name__,
            "failures": getattr(error, "failures", None),
            "text": str(error),
            "seconds": time.monotonic() - when,
        }
    return "no error"


def _resolve(work):
    import importlib

    module, _, name = work.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(
    ("work", "ranks_per_host"),
    [
        pytest.param("safeload.filling.copy_hashed", 1, id="while they wait for the source"),
        pytest.param("safeload.broadcasting._copy", 1, id="in the payload", marks=pytest.mark.slow),
        pytest.param("safeload.broadcasting._copy", 2, id="in the payload among the hosts' first ranks"),
        pytest.param("safeload.filling.copy_hashed", 2, id="while two a host wait", marks=pytest.mark.slow),
    ],
)
def test_a_host_that_is_cut_off(work, ranks_per_host, folder):
    lost = 2
    with hosts(3) as cluster:
        mark = Path("/tmp") / cluster.names[0]
        try:
            options = cluster.options(ranks_per_host=ranks_per_host)
            size = 3 * ranks_per_host
            results = run_on_ranks(size, lose_a_host, folder, cluster, work, lost, timeout_s=60, **options)
        finally:
            mark.unlink(missing_ok=True)
    for result in results:
        assert result.ok, result.describe()
        seen = result.value
        assert seen["class"] == "PeerError", seen
        assert seen["seconds"] < PROMPT_S, seen
    gone = set(range(lost * ranks_per_host, size))
    for result in results[: min(gone)]:
        assert result.value["failures"].keys() <= gone, result.value
        assert "on host2" in result.value["text"]


def start_torchrun(cluster, host, job, log):
    """Start one host's torchrun there: with its own address, its own name, and its own files."""
    folder, source_rank, results = job
    hide = "" if host == source_rank // 2 else f"mount -t tmpfs none {folder.parent} && "
    torchrun = (
        f"{sys.executable} -m torch.distributed.run --nnodes {len(cluster.names)} --node-rank {host} --nproc-per-node 2"
        f" --master-addr {cluster.addresses[0]} --master-port {_PORT}"
        f" -m tests.torchrun_job {folder} {source_rank} {results}"
    )
    shell = f"hostname host{host} && {hide}exec {torchrun}"
    command = ["ip", "netns", "exec", cluster.names[host], "unshare", "--uts", "sh", "-c", shell]
    repository = Path(__file__).resolve().parents[1]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD_SIZE", "MASTER_"))}
    settings = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment = kept | settings | {"PYTHONPATH": os.pathsep.join([str(repository), kept.get("PYTHONPATH", "")])}
    return subprocess.Popen(
        command, cwd=repository, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )


@pytest.mark.timeout(240)
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_torchrun_on_every_host(count, folder, tmp_path):
    source_rank = 2  # on the second host
    logs = [tmp_path / f"host{host}.log" for host in range(count)]
    with hosts(count) as cluster, contextlib.ExitStack() as stack:
        running = []
        for host, log in enumerate(logs):
            job = (folder, source_rank, tmp_path)
            running.append(start_torchrun(cluster, host, job, stack.enter_context(log.open("w"))))
            stack.callback(stop, running[-1])
        statuses = [each.wait(timeout=200) for each in running]
    text = "\n".join(log.read_text() for log in logs)
    assert statuses == [0] * count, text
    seen = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2 * count)]
    assert [each["local_rank"] for each in seen] == [0, 1] * count
    assert len({each["digest"] for each in seen}) == 1
    assert [each["host"] for each in seen] == [f"host{host}" for host in range(count) for _ in range(2)]
    assert {json.dumps(each["hosts"]) for each in seen} == {json.dumps([[2 * h, 2 * h + 1] for h in range(count)])}
    assert [bool(each["files"]) for each in seen] == [rank // 2 == source_rank // 2 for rank in range(2 * count)]


def stop(process):
    """End a torchrun and all that it started: they are one session."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
