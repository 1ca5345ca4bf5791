"""Turn a plain test function into N ranks, on any machine.

    @on_ranks(2)
    def test_sum(tmp_path): ...            # the body runs in two processes of one gloo group

    results = run_on_ranks(2, body, *args) # for tests that expect some ranks to die or to raise

Processes are forked from a server that has torch, transformers and safeload loaded already, so that a test starts in
tens of milliseconds after the first one. Each rank has a clean environment (RANK, LOCAL_RANK, WORLD_SIZE,
MASTER_ADDR...), its output and, where it hangs, its stacks are shown, its exit status counts, and nothing outlives the
test.
A test fails when a rank raises, ends before its function returned (also by exit(0)), ends with a bad status, or is
late. A warning that points at safeload or at a test is an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import importlib
import inspect
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

__all__ = ["RankResult", "RanksFailed", "on_ranks", "run_on_ranks"]

_PRELOAD: Final = [
    "pytest",
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "safetensors.torch",
    "transformers.modeling_utils",
    "transformers.models.clip.modeling_clip",
    "accelerate",
    "safeload.demo_ranks",  # and with it all of safeload that a rank needs: 0.4 s for each run of ranks
]
_GRACE_S: Final = 5.0  # how long siblings of a failed rank may go on, so that they can say why they end
_STACKS_S: Final = 0.5  # how long a late rank has to write its stacks before it is killed
_DROPPED: Final = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_", "HF_", "TRANSFORMERS_", "GROUP_", "ROLE_")
_FOREIGN: Final = r"(torch|transformers|accelerate|huggingface_hub|safetensors|tqdm|numpy|diffusers|timm|peft)(\.|$)"
_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """What became of one rank.

    `returned` is true only where the function came to its end; `value` is then what it returned. `error` is the
    exception it raised. `exit_status` is negative for a signal. `output` is all that the process printed.
    """

    rank: int
    returned: bool = False
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    exit_status: int | None = None
    late: bool = False
    output: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the function returned, in time, and the process ended well."""
        return self.returned and not self.late and self.exit_status == 0

    def describe(self) -> str:
        """Say in a paragraph how the rank ended, with its traceback and what it printed."""
        if self.late:
            how = f"did not end in time, killed after {self.seconds:.1f} s"
        elif self.error is not None:
            how = f"raised {type(self.error).__name__}"
        elif not self.returned:
            how = f"ended before its function returned, exit status {self.exit_status}"
        else:
            how = f"exit status {self.exit_status}"
        return f"--- rank {self.rank}: {how}\n{self.trace}{_tail(self.output)}"


class RanksFailed(AssertionError):
    """Some ranks failed; the message holds each one's traceback and output."""

    def __init__(self, results: list[RankResult]) -> None:
        super().__init__("\n" + "\n".join(result.describe() for result in results if not result.ok))
        self.results = results


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """All that a rank needs to know; picklable."""

    rank: int
    size: int
    module: str
    qualname: str
    args: bytes
    env: dict[str, str]
    folder: str
    store: str
    backend: str
    group_timeout_s: float
    foreign_warnings: str
    before: bytes


@dataclass(slots=True, kw_only=True)
class _Running:
    job: _Job
    process: Any
    pipe: multiprocessing.connection.Connection
    started: float = field(default_factory=time.monotonic)
    result: RankResult | None = None
    stacks_asked: bool = False


def on_ranks(
    size: int, *, timeout_s: float = 60, **options: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated test in `size` processes of one process group; fail if any rank fails.

    Args:
        size: Number of ranks.
        timeout_s: Limit for the whole run; a rank that is late is shown with its stacks and killed.
        options: As in `run_on_ranks`.

    Fixtures such as `tmp_path` work; their values travel by pickle.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(*args: Any, **kwargs: Any) -> None:
            results = _run(size, body, args, kwargs, timeout_s=timeout_s, stop_siblings=True, **options)
            if not all(result.ok for result in results):
                raise RanksFailed(results)

        test._body_on_ranks = body  # type: ignore[attr-defined]
        return test

    return decorate


def run_on_ranks(
    size: int,
    body: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60,
    env: Mapping[str, str] | Callable[[int], Mapping[str, str]] | None = None,
    store: str = "file",
    backend: str = "gloo",
    group_timeout_s: float = 60,
    foreign_warnings: str = "ignore",
    before: Callable[[int], None] | None = None,
) -> list[RankResult]:
    """Run `body(*args)` in `size` processes of one process group and tell how each one ended.

    Args:
        size: Number of ranks.
        body: A function at module level.
        args: Picklable arguments, the same for every rank.
        timeout_s: Limit for the whole run; ranks that are late are killed and their result says so.
        env: Environment variables for every rank, or a function from the rank to them.
        store: "file", "tcp" (rank 0 serves it on a free port) or "none" (no process group is made).
        backend: Backend of the group.
        group_timeout_s: The process group's own timeout.
        foreign_warnings: What to do with warnings that point at other libraries' own lines.
        before: Called with the rank in its process before the process group is made; picklable.

    Returns:
        One result a rank, in rank order. Check `result.ok`; nothing is raised for a rank that failed.
    """
    options: dict[str, Any] = {"env": env, "store": store, "backend": backend, "group_timeout_s": group_timeout_s}
    options |= {"foreign_warnings": foreign_warnings, "before": before}
    return _run(size, body, args, {}, timeout_s=timeout_s, stop_siblings=False, **options)


def _run(
    size: int,
    body: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    timeout_s: float,
    stop_siblings: bool,
    env: Mapping[str, str] | Callable[[int], Mapping[str, str]] | None = None,
    store: str = "file",
    backend: str = "gloo",
    group_timeout_s: float = 60,
    foreign_warnings: str = "ignore",
    before: Callable[[int], None] | None = None,
) -> list[RankResult]:
    folder = tempfile.mkdtemp(prefix="safeload-ranks-")
    common = _Job(
        rank=0,
        size=size,
        module=body.__module__,
        qualname=body.__qualname__,
        args=pickle.dumps((args, kwargs)),
        env={},
        folder=folder,
        store=store,
        backend=backend,
        group_timeout_s=group_timeout_s,
        foreign_warnings=foreign_warnings,
        before=pickle.dumps(before),
    )
    running: list[_Running] = []
    try:
        for rank in range(size):
            extra = env(rank) if callable(env) else env or {}
            running.append(_start(replace(common, rank=rank, env=_environment(rank, size) | dict(extra))))
        _watch(running, timeout_s=timeout_s, stop_siblings=stop_siblings)
        return [_finish(each) for each in running]
    finally:
        for each in running:
            _end(each)
        shutil.rmtree(folder, ignore_errors=True)


# --- the parent's side ---


@functools.cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    # The server reads these once, when it imports torch; children can not change them any more.
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in threads}
    os.environ.update(threads)
    try:
        from multiprocessing import forkserver

        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context


def _environment(rank: int, size: int) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED)}
    return kept | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _start(job: _Job) -> _Running:
    context = _context()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_rank_main, args=(job, theirs), name=f"rank-{job.rank}", daemon=True)
    process.start()
    theirs.close()
    return _Running(job=job, process=process, pipe=ours)


def _watch(running: list[_Running], *, timeout_s: float, stop_siblings: bool) -> None:
    deadline = time.monotonic() + timeout_s
    while any(each.process.is_alive() for each in running):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return _stop_late(running)
        waits = [each.process.sentinel for each in running if each.process.is_alive()]
        waits += [each.pipe for each in running if each.result is None and not each.pipe.closed]
        multiprocessing.connection.wait(waits, timeout=min(left_s, 1.0))
        for each in running:
            _receive(each)
        if stop_siblings and any(_failed(each) for each in running):
            deadline, stop_siblings = min(deadline, time.monotonic() + _GRACE_S), False
    for each in running:
        _receive(each)
    return None


def _receive(each: _Running) -> None:
    if each.result is not None or each.pipe.closed:
        return
    try:
        if each.pipe.poll(0):
            each.result = each.pipe.recv()
    except (EOFError, OSError):
        each.pipe.close()


def _failed(each: _Running) -> bool:
    if each.result is not None and each.result.error is not None:
        return True
    return not each.process.is_alive() and (each.process.exitcode != 0 or each.result is None)


def _stop_late(running: list[_Running]) -> None:
    late = [each for each in running if each.process.is_alive()]
    for each in late:
        each.stacks_asked = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(each.process.pid, signal.SIGUSR1)
    time.sleep(_STACKS_S)
    for each in late:
        each.process.kill()
        each.process.join()
        _receive(each)


def _finish(each: _Running) -> RankResult:
    each.process.join(timeout=5)
    result = each.result or RankResult(rank=each.job.rank)
    log = Path(each.job.folder, f"output-{each.job.rank}")
    return replace(
        result,
        exit_status=each.process.exitcode,
        late=each.stacks_asked,
        output=log.read_text(errors="replace") if log.exists() else "",
        seconds=time.monotonic() - each.started if each.stacks_asked else result.seconds,
    )


def _end(each: _Running) -> None:
    if each.process.is_alive():
        each.process.kill()
    each.process.join()
    each.process.close()
    if not each.pipe.closed:
        each.pipe.close()


def _tail(output: str, lines: int = 80) -> str:
    kept = output.splitlines()[-lines:]
    return "".join(f"    | {line}\n" for line in kept)


# --- the rank's side ---


def _rank_main(job: _Job, pipe: multiprocessing.connection.Connection) -> None:
    began = time.monotonic()
    _isolate(job)
    body = _find(job.module, job.qualname)
    args, kwargs = pickle.loads(job.args)
    before = pickle.loads(job.before)
    try:
        if before is not None:
            before(job.rank)
        with _warnings_are_errors(job), _process_group(job):
            value = body(*args, **kwargs)
        result = RankResult(rank=job.rank, returned=True, value=value, seconds=time.monotonic() - began)
    except BaseException as error:
        trace = traceback.format_exc()
        result = RankResult(rank=job.rank, error=_picklable(error), trace=trace, seconds=time.monotonic() - began)
    with contextlib.suppress(BrokenPipeError):  # the parent gave up already
        pipe.send(result)
    pipe.close()
    sys.exit(0 if result.returned else 1)


def _isolate(job: _Job) -> None:
    if sys.platform == "linux":  # the fork server ends with the test run, and a rank with the fork server
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    log = os.open(Path(job.folder, f"output-{job.rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 (lives as long as the process)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    os.environ.clear()
    os.environ.update(job.env)
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)


def _find(module: str, qualname: str) -> Callable[..., Any]:
    found: Any = importlib.import_module(module)
    for name in qualname.split("."):
        if name == "<locals>":
            raise TypeError(f"{module}.{qualname}: a rank's function must be at module level")
        found = getattr(found, name)
    return inspect.unwrap(found, stop=lambda each: not hasattr(each, "_body_on_ranks"))


@contextlib.contextmanager
def _warnings_are_errors(job: _Job) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        action: Any = job.foreign_warnings
        warnings.filterwarnings(action, module=_FOREIGN)
        yield


@contextlib.contextmanager
def _process_group(job: _Job) -> Iterator[None]:
    import torch.distributed as dist

    if job.store == "none":
        yield
        return
    store = _open_store(job)
    timeout = timedelta(seconds=job.group_timeout_s)
    dist.init_process_group(job.backend, store=store, rank=job.rank, world_size=job.size, timeout=timeout)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _open_store(job: _Job) -> Any:
    import torch.distributed as dist

    timeout = timedelta(seconds=job.group_timeout_s)
    if job.store == "file":
        return dist.FileStore(str(Path(job.folder, "store")), job.size)
    host, address = job.env["MASTER_ADDR"], Path(job.folder, "port")
    if job.rank == 0:
        store = dist.TCPStore(host, 0, job.size, True, timeout, wait_for_workers=False)
        draft = address.with_suffix(".new")
        draft.write_text(str(store.port))
        draft.rename(address)  # readers see nothing or all of it
    else:
        deadline = time.monotonic() + job.group_timeout_s
        while not address.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("rank 0 did not open its store")
            time.sleep(0.005)
        store = dist.TCPStore(host, int(address.read_text()), job.size, False, timeout)
    os.environ["MASTER_PORT"] = str(store.port)
    return store


def _picklable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
