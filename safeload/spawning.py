"""Run a function in N processes of one process group, without a launcher, and leave no process behind.

Receives a function's name and its arguments; gives what it returned on each rank. The group is gloo over a file
store, so no port is taken. The processes end with this one, however it ends: each of them watches for that.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from safeload.errors import PeerError, SafeLoadError, from_fields

__all__ = ["run_ranks"]

_GRACE_S: Final = 5.0  # from the first failed rank to the end of the others, which may have more to say
_STOP_S: Final = 5.0
_OUTPUT_BYTES: Final = 4000  # of what a failed rank printed last
_THREADS: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

Answer = tuple[str, Any]  # ("value", what it returned), ("ours", fields of our error) or ("foreign", traceback)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    rank: int
    size: int
    folder: str
    timeout_s: float
    env: Mapping[str, str]


@dataclass(slots=True, kw_only=True)
class _Rank:
    process: Any
    pipe: multiprocessing.connection.Connection
    answer: Answer | None = None


def run_ranks(
    function: str,
    *args: Any,
    ranks: int,
    timeout: timedelta,
    env: Mapping[str, str] | None = None,
    preload: Sequence[str] = (),
) -> tuple[Any, ...]:
    """Run a function on every rank of a new process group.

    Args:
        function: "module.function"; this process does not import it. What goes in and comes out travels by pickle.
        *args: The same for every rank.
        ranks: Number of processes.
        timeout: For the whole; also the process group's own.
        env: Set in every rank, before anything is imported there.
        preload: Modules to import once for all ranks, where the system can fork.

    Returns:
        What each rank returned, in rank order.

    Raises:
        SafeLoadError: A rank raised it.
        PeerError: A rank raised something else, ended early or did not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="safeload-ranks-") as folder:
        jobs = [
            _Job(rank=rank, size=ranks, folder=folder, timeout_s=timeout.total_seconds(), env=dict(env or {}))
            for rank in range(ranks)
        ]
        started: list[_Rank] = []
        try:
            with _no_thread_pools(), _deaf_to_ctrl_c():
                context = _context(preload)
                started.extend(_start(context, job, function, args) for job in jobs)
            _wait(started, until=time.monotonic() + timeout.total_seconds())
            return _values(started, Path(folder))
        finally:
            for rank in started:
                _stop(rank)


# --- the parent's side ---


@contextlib.contextmanager
def _no_thread_pools() -> Iterator[None]:
    """Let the ranks begin with one thread each: N of them share this machine."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update({name: value or "1" for name, value in before.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]


@contextlib.contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Let what is started here ignore Ctrl-C from its first moment on: it reaches the whole terminal, and we decide."""
    if threading.current_thread() is not threading.main_thread():  # only there can a signal be set
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _context(preload: Sequence[str]) -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    return context


def _start(context: Any, job: _Job, function: str, args: tuple[Any, ...]) -> _Rank:
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=_rank_main, args=(job, theirs, function, args), name=f"rank-{job.rank}", daemon=True
    )
    process.start()
    theirs.close()
    return _Rank(process=process, pipe=ours)


def _wait(ranks: Sequence[_Rank], *, until: float) -> None:
    """Wait until every rank has answered or ended, or until shortly after the first one failed."""
    while True:
        open_ranks = [rank for rank in ranks if rank.answer is None]
        left_s = until - time.monotonic()
        if not open_ranks or left_s <= 0:
            return
        for rank in open_ranks:
            _receive(rank)
        if any(rank.answer is not None and rank.answer[0] != "value" for rank in ranks):
            until = min(until, time.monotonic() + _GRACE_S)
        waits = [rank.pipe for rank in open_ranks if rank.answer is None]
        multiprocessing.connection.wait(waits, timeout=min(left_s, 1.0))


def _receive(rank: _Rank) -> None:
    if not rank.pipe.poll(0):
        return
    try:
        rank.answer = rank.pipe.recv()
    except EOFError:  # it ended without an answer
        rank.process.join(timeout=_STOP_S)
        rank.answer = ("foreign", f"ended without a word, exit status {rank.process.exitcode}")


def _values(ranks: Sequence[_Rank], folder: Path) -> tuple[Any, ...]:
    answers = [rank.answer or ("foreign", "did not end in time") for rank in ranks]
    ours: list[Any] = [payload for kind, payload in answers if kind == "ours"]
    if ours:
        raise from_fields(ours[0])
    failures = {
        rank: f"{payload}{_last_output(folder, rank)}"
        for rank, (kind, payload) in enumerate(answers)
        if kind == "foreign"
    }
    if failures:
        told = "\n".join(f"rank {rank}: {text}" for rank, text in failures.items())
        raise PeerError(f"{len(failures)} of {len(ranks)} ranks failed:\n{told}", failures=failures)
    return tuple(payload for _, payload in answers)


def _last_output(folder: Path, rank: int) -> str:
    path = folder / f"output-{rank}"
    text = path.read_text(errors="replace")[-_OUTPUT_BYTES:].strip() if path.exists() else ""
    return f"\nIt printed:\n{text}" if text else ""


def _stop(rank: _Rank) -> None:
    rank.process.join(timeout=_STOP_S if rank.answer is not None and rank.answer[0] == "value" else 0)
    if rank.process.is_alive():
        rank.process.kill()
    rank.process.join()
    rank.process.close()
    rank.pipe.close()


# --- the rank's side ---


def _rank_main(job: _Job, pipe: multiprocessing.connection.Connection, function: str, args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # also where the fork server was started by somebody else
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()
    _print_into(Path(job.folder, f"output-{job.rank}"))
    os.environ.update(_environment(job))
    try:
        module, _, name = function.rpartition(".")
        body = getattr(importlib.import_module(module), name)
        with _process_group(job):
            answer: Answer = ("value", body(*args))
    except SafeLoadError as error:
        answer = ("ours", error.to_fields())
    except Exception:
        answer = ("foreign", traceback.format_exc())
    with contextlib.suppress(BrokenPipeError):  # the parent has given up on this run
        pipe.send(answer)
    pipe.close()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _print_into(path: Path) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _environment(job: _Job) -> dict[str, str]:
    """Return what a launcher would have set; nobody is meant to listen at the address, since the store is a file."""
    return {
        "RANK": str(job.rank),
        "LOCAL_RANK": str(job.rank),
        "WORLD_SIZE": str(job.size),
        "LOCAL_WORLD_SIZE": str(job.size),
        "TOKENIZERS_PARALLELISM": "false",
        **job.env,
    }


@contextlib.contextmanager
def _process_group(job: _Job) -> Iterator[None]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // job.size))
    timeout = timedelta(seconds=job.timeout_s)
    store = dist.FileStore(str(Path(job.folder, "store")), job.size)  # type: ignore[attr-defined]  # as documented
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.size, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()
