"""The only door to torch.distributed: one group of ranks that load together.

Receives a process group, or none; gives a `Group` whose methods every rank calls in the same order. Promises:
- a failure on any rank is the same typed error on every rank, whose process group works again where its members live;
- ranks wait for each other over the store, never inside a collective, so that work may take longer than the process
  group's own timeout; collectives only start when every rank is there for them;
- a rank that has died is noticed within 10 s, silence ends at `timeout`, and both name the rank.

Ranks are ranks in the group here; those in errors are global ranks.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
import torch.distributed as dist

from safeload import statements, wiring
from safeload.agreeing import Call, Seat
from safeload.errors import GroupError, MismatchedCallError, PeerError, SafeLoadError
from safeload.watching import Identity, identify

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

__all__ = ["Group", "join_group"]

T = TypeVar("T")
_WINDOW_BYTES: Final = 1024**3  # sent for one `go`: the others learn of a failure after at most this much more
_POLL_S: Final = (0.00005, 0.002)  # shortest and longest pause between two looks at a running collective
_BLAME_S: Final = 10.0  # a broken collective waits this long for the reason, which the watch finds out
_SHOWN_CALLS: Final = 16


@dataclass(slots=True)
class _Past:
    """What one process remembers of a process group between calls; goes with the group."""

    calls: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)  # re-entrant: a tower may be made of towers
    known: dict[int, Identity] = field(default_factory=dict)


_pasts: weakref.WeakKeyDictionary[Any, _Past] = weakref.WeakKeyDictionary()
_pasts_lock = threading.Lock()


def join_group(
    group: ProcessGroup | None = None, *, source_rank: int = 0, timeout: timedelta = timedelta(minutes=30)
) -> Group:
    """Return the group to load in, to be entered with `with`.

    Args:
        group: A process group, or a one-dimensional device mesh; None is the default group, if there is one.
        source_rank: Rank in the group that reads.
        timeout: How long the ranks wait for each other to come, and again for the whole load to end.

    Returns:
        A group of one, which needs no torch.distributed, where there is no process group.

    Raises:
        GroupError: This process is not a member, or there is no such `source_rank`.

    Ranks: called on every rank of `group`, in the same order.
    """
    if not (dist.is_available() and dist.is_initialized()):
        _warn_if_alone()
        return Group()
    group = _resolve(group)
    size = dist.get_world_size(group)
    if not 0 <= source_rank < size:
        raise GroupError(f"source_rank is {source_rank}, but the group has ranks 0 to {size - 1} (ranks in the group)")
    if size == 1:
        return Group(global_rank=dist.get_rank())
    return _RankGroup(group, source_rank=source_rank, timeout=timeout)


def _warn_if_alone() -> None:
    size = os.environ.get("WORLD_SIZE", "1")
    if size.isdecimal() and int(size) > 1:
        warnings.warn(
            f"WORLD_SIZE is {size} but there is no process group yet, so every rank loads and verifies for itself. "
            "Call torch.distributed.init_process_group() (or make the Accelerator, or the Trainer's arguments) first, "
            "and one rank reads for all.",
            UserWarning,
            stacklevel=3,
        )


def _resolve(group: Any) -> ProcessGroup:
    if group is None:
        return dist.group.WORLD  # type: ignore[return-value]  # set, since the default group is initialised
    if hasattr(group, "get_group") and hasattr(group, "ndim"):
        if group.ndim != 1:
            raise GroupError(
                f"group is a device mesh of {group.ndim} dimensions {group.mesh_dim_names}; pass the one to load in, "
                "as mesh['name'], or mesh.get_group('name'), or a process group"
            )
        group = group.get_group()
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise GroupError(
            f"rank {dist.get_rank()} is not a member of the group it loads in; only members may call",
            rank=dist.get_rank(),
        )
    return group  # type: ignore[no-any-return]


class Group:
    """A group of ranks that load together; this class itself is the group of one.

    Attributes:
        rank: This process's rank in the group.
        size: Number of ranks.
        source_rank: Rank in the group that reads.
        global_rank: This process's rank in the whole job.
        host: Name of this host.
        hosts: Ranks (in the group) by host, in rank order: those of one tuple share a kernel, pids and memory.
        devices: Types of device whose tensors `broadcast` takes, the cpu first.
    """

    def __init__(self, *, global_rank: int = 0) -> None:
        self._identity = identify(global_rank)
        self.rank, self.size, self.source_rank, self.global_rank = 0, 1, 0, global_rank
        self.host = self._identity.host
        self.hosts: tuple[tuple[int, ...], ...] = ((0,),)
        self.devices: tuple[str, ...] = ()

    @property
    def is_source(self) -> bool:
        """Whether this rank reads."""
        return self.rank == self.source_rank

    @property
    def source_global_rank(self) -> int:
        """The source's rank in the whole job."""
        return self.global_rank

    def payload_device(self, device: torch.device) -> torch.device:
        """Choose where the tensors of `stream` and `broadcast` have to be.

        Args:
            device: Where this rank wants the bytes.

        Returns:
            `device` itself if the group's backends serve it, else one that they serve, the cpu if possible.
        """
        if not self.devices or device.type in self.devices:
            return device
        return torch.device("cpu") if "cpu" in self.devices else torch.device(self.devices[0])

    def __enter__(self) -> Group:
        """Meet the other ranks.

        Raises:
            PeerError: Not all of them came in time.
            MismatchedCallError: They do not agree on the source.
        """
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave together: every rank leaves well, or every rank raises.

        Raises:
            SafeLoadError: Another rank failed after the last stage.
        """

    def start(self, call: Mapping[str, str]) -> None:
        """State what this rank called; all ranks must have called the same.

        Args:
            call: Names of arguments and their values, as text.

        Raises:
            MismatchedCallError: The ranks called different things.

        Ranks: called on every rank of the group.
        """

    def agree(self, stage: str, fn: Callable[[], T]) -> T:
        """Run `fn` on every rank; return its value where it went well on all of them.

        Args:
            stage: Name of the stage, for errors.
            fn: This rank's work; it may take as long as the call's timeout.

        Raises:
            SafeLoadError: `fn` failed on some rank: an error of ours with class and data, any other as `PeerError`.

        Ranks: called on every rank of the group.
        """
        try:
            return fn()
        except Exception as error:
            failure = statements.describe_failure(error, who=self._identity, stage=stage)
            raise statements.rebuild(failure, error) from error

    def on_source(self, stage: str, fn: Callable[[], T]) -> T | None:
        """Run `fn` on the source while the others wait; the value on the source, None elsewhere.

        Args:
            stage: Name of the stage, for errors.
            fn: The source's work.

        Raises:
            SafeLoadError: As in `agree`.

        Ranks: called on every rank of the group.
        """
        return self.agree(stage, fn)

    def send_bytes(self, stage: str, payload: bytes | None) -> bytes:
        """Return the source's bytes, on every rank.

        Args:
            stage: Name of the stage, for errors.
            payload: On the source: what to send.

        Raises:
            SafeLoadError: As in `agree`.

        Ranks: called on every rank of the group.
        """
        return payload or b""

    def gather_bytes(self, stage: str, payload: bytes) -> tuple[bytes, ...]:
        """Return every rank's small record, in rank order, on every rank.

        Args:
            stage: Name of the stage, for errors.
            payload: This rank's record.

        Raises:
            SafeLoadError: As in `agree`.

        Ranks: called on every rank of the group.
        """
        return (payload,)

    def check(self) -> None:
        """Raise if the stage is known to have failed elsewhere. Cheap; for long work inside of a stage.

        Raises:
            SafeLoadError: What the others raise as well.
        """

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Fill every rank's tensor with the source's bytes. `stream` is the safe way for several tensors.

        Args:
            tensor: `[size_bytes]`, uint8, contiguous, of the same size on every rank.

        Raises:
            SafeLoadError: A rank was lost or failed, or the timeout is over.

        Ranks: called on every rank of the group, none of which may fail between the last stage and this call.
        """

    def send(self, tensor: torch.Tensor, to_rank: int) -> None:
        """Send bytes to one rank, which calls `recv`. As `broadcast` otherwise."""

    def recv(self, tensor: torch.Tensor, from_rank: int) -> None:
        """Receive bytes from one rank, which calls `send`. As `broadcast` otherwise."""

    def stream(
        self,
        stage: str,
        sizes_bytes: Sequence[int],
        fill: Callable[[int], torch.Tensor],
        take: Callable[[int, torch.Tensor], None],
        *,
        device: str | torch.device = "cpu",
    ) -> None:
        """Broadcast buckets one after another; a failure on a living rank stops all of them in step.

        Args:
            stage: Name of the stage, for errors.
            sizes_bytes: Size of each bucket, the same on every rank.
            fill: From the number of a bucket to its tensor: `[size]` uint8, holding the bytes on the source, and to be
                received into on the others.
            take: Called with number and tensor once the bytes are there, on every rank.
            device: Where the buckets are.

        Raises:
            SafeLoadError: As in `agree`. Where all ranks live, no collective is left unfinished.

        Ranks: called on every rank of the group.
        """

        def run() -> None:
            for index in range(len(sizes_bytes)):
                take(index, fill(index))

        self.agree(stage, run)


class _StuckError(Exception):
    """A collective broke off on this rank; the others may be stuck in it."""


class _RankGroup(Group):
    """Several ranks of one process group."""

    def __init__(self, group: ProcessGroup, *, source_rank: int, timeout: timedelta) -> None:
        super().__init__(global_rank=dist.get_rank())
        self._group, self._timeout = group, timeout
        self.rank, self.size, self.source_rank = dist.get_rank(group), dist.get_world_size(group), source_rank
        ranks = tuple(dist.get_global_rank(group, rank) for rank in range(self.size))
        self._seat = Seat(rank=self.rank, global_ranks=ranks, identity=self._identity)
        self.devices = wiring.device_types(group)
        with _pasts_lock:
            self._past = _pasts.setdefault(group, _Past())
        self._call: Call

    @property
    def source_global_rank(self) -> int:
        return self._seat.global_ranks[self.source_rank]

    # --- in and out ---

    def __enter__(self) -> Group:
        if not self._past.lock.acquire(timeout=self._timeout.total_seconds()):
            raise GroupError(
                f"another thread has been loading in this group for {self._timeout}; load one after another, or give "
                "each thread a group of its own",
                rank=self.global_rank,
            )
        try:
            store = wiring.call_store(self._group, self._seat.global_ranks, self._past.calls, timeout=self._timeout)
            self._past.calls += 1  # also for a call that fails: its number is used up on every rank
            self._call = Call(store, self._seat, timeout=self._timeout, remembered=self._past.known)
            try:
                self._meet()
            except BaseException as error:
                raise self._depart(error) from error.__cause__
        except BaseException:
            self._past.lock.release()
            raise
        return self

    def _meet(self) -> None:
        self._call.enter()
        mine = {"source_rank": self.source_rank, "kernel": self._identity.kernel}
        raw = self._call.gather(statements.payload_bytes(json.dumps(mine).encode()), self._decide_join)
        self.hosts = tuple(tuple(ranks) for ranks in json.loads(raw))
        mates = next(ranks for ranks in self.hosts if self.rank in ranks)
        neighbour = mates[(mates.index(self.rank) + 1) % len(mates)]
        self._call.follow_source(self.source_rank, neighbour=None if neighbour == self.rank else neighbour)

    def _decide_join(self, payloads: tuple[bytes, ...]) -> bytes:
        said = [json.loads(raw) for raw in payloads]
        self._compare([{"source_rank": str(each["source_rank"])} for each in said])
        hosts: dict[str, list[int]] = {}
        for rank, each in enumerate(said):
            hosts.setdefault(each["kernel"], []).append(rank)
        return json.dumps(list(hosts.values())).encode()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                try:
                    self.agree("finish", lambda: None)
                except BaseException as late:
                    raise self._depart(late) from late.__cause__
                self._call.leave()
            else:
                departing = self._depart(error)
                if departing is not error:
                    raise departing from error
        finally:
            self._past.known = dict(self._call.watch.known)
            self._past.lock.release()

    def _depart(self, error: BaseException) -> BaseException:
        """Leave with an error: the agreed one as it is, any other is told to the ranks first."""
        agreed: BaseException | None = error if error is self._call.agreed else None
        if agreed is None:
            agreed = self._call.give_up(error, wait=isinstance(error, Exception))
        self._call.leave()
        return agreed if agreed is not None and isinstance(error, Exception) else error

    # --- stages ---

    def start(self, call: Mapping[str, str]) -> None:
        self._call.begin("start")
        statement = statements.payload_bytes(json.dumps(dict(call)).encode())
        self._call.gather(statement, lambda raws: self._compare([json.loads(raw) for raw in raws]))

    def _compare(self, calls: list[dict[str, str]]) -> bytes:
        names = list(dict.fromkeys(name for call in calls for name in call))
        differing = [name for name in names if len({call.get(name) for call in calls}) > 1]
        if not differing:
            return b""
        sides: dict[str, list[int]] = {}
        for rank, call in zip(self._seat.global_ranks, calls, strict=True):
            said = ", ".join(f"{name}={call[name]}" if name in call else f"no {name}" for name in differing)
            sides.setdefault(said, []).append(rank)
        shown = "; ".join(
            f"rank{'s' if len(ranks) > 1 else ''} {_list(ranks)}: {said}" for said, ranks in sides.items()
        )
        raise MismatchedCallError(
            f"the ranks made different calls: {shown}. Every rank of the group must load the same towers with the same "
            "arguments in the same order",
            calls={rank: said for said, ranks in sides.items() for rank in ranks[:_SHOWN_CALLS]},
        )

    def agree(self, stage: str, fn: Callable[[], T]) -> T:
        self._call.begin(stage)
        value, statement, cause = self._attempt(stage, fn)
        self._call.gather(statement, lambda _: b"", cause)
        return value

    def on_source(self, stage: str, fn: Callable[[], T]) -> T | None:
        self._call.begin(stage)
        if not self.is_source:
            self._call.announce(None)
            return None
        value, statement, cause = self._attempt(stage, fn)
        self._call.announce(statement, cause)
        return value

    def send_bytes(self, stage: str, payload: bytes | None) -> bytes:
        self._call.begin(stage)
        return self._call.announce(statements.payload_bytes(payload or b"") if self.is_source else None)

    def gather_bytes(self, stage: str, payload: bytes) -> tuple[bytes, ...]:
        self._call.begin(stage)
        return statements.unpack(self._call.gather(statements.payload_bytes(payload), statements.pack))

    def check(self) -> None:
        self._call.check()

    def _attempt(self, stage: str, fn: Callable[[], T]) -> tuple[T, bytes, Exception | None]:
        try:
            return fn(), statements.payload_bytes(b""), None
        except Exception as error:
            # No value: the caller raises before it would use it.
            return None, self._failure_of(error, stage), error  # type: ignore[return-value]

    def _failure_of(self, error: Exception, stage: str, *, stuck: bool = False) -> bytes:
        failure = statements.describe_failure(error, who=self._identity, stage=stage, stuck=stuck)
        return statements.failure_bytes(failure)

    # --- payload ---

    def broadcast(self, tensor: torch.Tensor) -> None:
        _checked(tensor, tensor.numel())
        try:
            self._broadcast(tensor)
        except _StuckError as error:
            raise self._blame(error) from error.__cause__

    def send(self, tensor: torch.Tensor, to_rank: int) -> None:
        _checked(tensor, tensor.numel())
        self._point_to_point(lambda: dist.isend(tensor, self._seat.global_ranks[to_rank], group=self._group))

    def recv(self, tensor: torch.Tensor, from_rank: int) -> None:
        _checked(tensor, tensor.numel())
        self._point_to_point(lambda: dist.irecv(tensor, self._seat.global_ranks[from_rank], group=self._group))

    def _point_to_point(self, begin: Callable[[], Work | None]) -> None:
        """Run one transfer; gloo's make no progress that a poll could see, so that a thread waits for it."""
        ended: Future[None] = Future()
        thread = threading.Thread(target=_wait_for, args=(begin, ended), name="safeload-transfer", daemon=True)
        thread.start()
        try:
            while not ended.done():
                self._call.check()
                concurrent.futures.wait([ended], timeout=_POLL_S[1])
            ended.result()
        except RuntimeError as error:
            raise self._blame(_StuckError(f"a transfer broke off: {error}")) from error
        thread.join()

    def _broadcast(self, tensor: torch.Tensor) -> None:
        source = self._seat.global_ranks[self.source_rank]
        self._complete(lambda: dist.broadcast(tensor, src=source, group=self._group, async_op=True))

    def _complete(self, begin: Callable[[], Work | None]) -> None:
        """Wait for a collective, with an eye on the others: a lost rank would leave this one waiting for ever."""
        pause_s = _POLL_S[0]
        try:
            work = begin()
            while work is not None and not work.is_completed():
                self._call.check()
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _POLL_S[1])
            if work is not None:
                work.wait()
        except RuntimeError as error:  # what the backends raise when a peer's connection is gone or too slow
            raise _StuckError(f"a transfer broke off: {error}") from error

    def _blame(self, error: _StuckError) -> SafeLoadError:
        """Find out why a collective broke off: a moment later the watch mostly knows which rank is gone."""
        until = time.monotonic() + _BLAME_S
        while time.monotonic() < until:
            try:
                self._call.check()
            except SafeLoadError as agreed:
                return agreed
            time.sleep(0.05)
        return PeerError(str(error), failures={self.global_rank: str(error)})

    def stream(
        self,
        stage: str,
        sizes_bytes: Sequence[int],
        fill: Callable[[int], torch.Tensor],
        take: Callable[[int, torch.Tensor], None],
        *,
        device: str | torch.device = "cpu",
    ) -> None:
        self.agree(stage, lambda: None)  # everybody is here, or nobody enters a collective
        self._call.begin(stage, draining=True)
        failed: Exception | None = None
        stuck = False
        try:
            for window in _windows(sizes_bytes):
                if not self._may_go_on(failed):
                    break
                for index in window:
                    failed = self._bucket(stage, index, sizes_bytes[index], fill, take, device=device, failed=failed)
        except _StuckError as error:
            failed, stuck = error, True
        statement = statements.payload_bytes(b"") if failed is None else self._failure_of(failed, stage, stuck=stuck)
        self._call.gather(statement, lambda _: b"", failed, stuck=stuck)

    def _may_go_on(self, failed: Exception | None) -> bool:
        if not self.is_source:
            return self._call.wait_go()
        stop = failed is not None or self._call.flagged
        self._call.go(stop=stop)
        return not stop

    def _bucket(
        self,
        stage: str,
        index: int,
        size_bytes: int,
        fill: Callable[[int], torch.Tensor],
        take: Callable[[int, torch.Tensor], None],
        *,
        device: str | torch.device,
        failed: Exception | None,
    ) -> Exception | None:
        """Send or receive one bucket. A rank that has failed takes part with scrap, so that no collective is left."""
        bucket: torch.Tensor | None = None
        if failed is None:
            try:
                bucket = _checked(fill(index), size_bytes)
            except Exception as error:
                failed = self._note(error, stage)
        self._broadcast(torch.empty(size_bytes, dtype=torch.uint8, device=device) if bucket is None else bucket)
        if failed is None and bucket is not None:
            try:
                take(index, bucket)
            except Exception as error:
                failed = self._note(error, stage)
        return failed

    def _note(self, error: Exception, stage: str) -> Exception:
        """Let the source know at once, so that it stops before the payload's end."""
        self._call.state_early(self._failure_of(error, stage))
        return error


def _wait_for(begin: Callable[[], Work | None], ended: Future[None]) -> None:
    try:
        work = begin()
        if work is not None:
            work.wait()
    except Exception as error:
        ended.set_exception(error)
    else:
        ended.set_result(None)


def _checked(tensor: torch.Tensor, size_bytes: int) -> torch.Tensor:
    if tensor.dtype != torch.uint8 or tensor.shape != (size_bytes,) or not tensor.is_contiguous():
        got = f"{tensor.dtype} {list(tensor.shape)}, {'' if tensor.is_contiguous() else 'not '}contiguous"
        raise GroupError(f"a transfer takes contiguous uint8 tensors of shape [{size_bytes}], got {got}")
    return tensor


def _windows(sizes_bytes: Sequence[int]) -> Iterator[list[int]]:
    window: list[int] = []
    window_bytes = 0
    for index, size_bytes in enumerate(sizes_bytes):
        if window and window_bytes + size_bytes > _WINDOW_BYTES:
            yield window
            window, window_bytes = [], 0
        window.append(index)
        window_bytes += size_bytes
    if window:
        yield window


def _list(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN_CALLS]))
    return shown if len(ranks) <= _SHOWN_CALLS else f"{shown} and {len(ranks) - _SHOWN_CALLS} more"
