"""Moving bytes over the process group's collectives, with an eye on the peers.

Receives uint8 tensors of known size; gives them filled, or the call's one error. A collective is polled, never waited
for blindly: a lost rank would leave the others in it for the process group's own timeout. Where all ranks live, every
collective that was begun is ended on every rank, so that the process group works again after a failure.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

from safeload import statements
from safeload.agreeing import Call
from safeload.errors import GroupError, PeerError, SafeLoadError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

__all__ = ["Payload", "Transfers"]

Begin = Callable[[], "Work | None"]
_WINDOW_BYTES: Final = 64 * 1024**2  # at least, sent for one `go`: the source has all of it when the others go in
_LONGEST_WINDOW_BYTES: Final = 1024**3  # at most: the others learn of a failure after this much more
_RANK_WINDOW_BYTES: Final = 1024**2  # more for each rank, as each `go` is asked for by all of them
_POLL_S: Final = (0.00005, 0.002)  # shortest and longest pause between two looks at a running collective
_BLAME_S: Final = 10.0  # a broken collective waits this long for the reason, which the watch finds out


class _StuckError(Exception):
    """A collective broke off on this rank; the others may be stuck in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """What a stream moves: `fill` gives a bucket's tensor, `take` gets it once the bytes are there.

    `ready` waits, on the source, until `fill` need not: no rank is in a collective meanwhile, which would time out.
    """

    stage: str
    sizes_bytes: Sequence[int]
    fill: Callable[[int], torch.Tensor]
    take: Callable[[int, torch.Tensor], None]
    ready: Callable[[int], None]
    device: str | torch.device


class Transfers:
    """The collectives of one call.

    Args:
        group: The process group.
        call: The call they belong to.
        source_rank: Rank in the group that sends.
    """

    def __init__(self, group: ProcessGroup, call: Call, source_rank: int) -> None:
        self._group, self._call = group, call
        self._source_rank = source_rank
        self._source_global_rank = call.seat.global_ranks[source_rank]

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Fill the tensor with the source's bytes; see `Group.broadcast`."""
        try:
            self._broadcast(_checked(tensor, tensor.numel()))
        except _StuckError as error:
            raise self._blame(error) from error.__cause__

    def send(self, tensor: torch.Tensor, to_rank: int) -> None:
        """Send to one rank; see `Group.send`."""
        _checked(tensor, tensor.numel())
        self._point_to_point(lambda: dist.isend(tensor, self._call.seat.global_ranks[to_rank], group=self._group))

    def recv(self, tensor: torch.Tensor, from_rank: int) -> None:
        """Receive from one rank; see `Group.recv`."""
        _checked(tensor, tensor.numel())
        self._point_to_point(lambda: dist.irecv(tensor, self._call.seat.global_ranks[from_rank], group=self._group))

    def stream(self, payload: Payload) -> None:
        """Broadcast buckets one after another; see `Group.stream`. Every rank is here already."""
        self._call.begin(payload.stage, draining=True)
        failed: Exception | None = None
        stuck = False
        try:
            for window in _windows(payload.sizes_bytes, self._call.seat.size):
                failed = self._get_ready(payload, window) if failed is None else failed
                if not self._may_go_on(failed):
                    break
                for index in window:
                    failed = self._move(payload, index, failed)
        except _StuckError as error:
            failed, stuck = error, True
        statement = statements.payload_bytes(b"")
        if failed is not None:
            statement = self._failure_of(failed, payload.stage, stuck=stuck)
        self._call.gather(statement, lambda _: b"", failed, stuck=stuck)

    def _get_ready(self, payload: Payload, window: Sequence[int]) -> Exception | None:
        if self._call.seat.rank == self._source_rank:
            try:
                with self._call.hold():
                    for index in window:
                        payload.ready(index)
            except Exception as error:
                return self._note(error, payload.stage)
        return None

    def _may_go_on(self, failed: Exception | None) -> bool:
        if self._call.seat.rank != self._source_rank:
            return self._call.wait_go()
        stop = failed is not None or self._call.flagged
        self._call.go(stop=stop)
        return not stop

    def _move(self, payload: Payload, index: int, failed: Exception | None) -> Exception | None:
        """Send or receive one bucket. A rank that has failed takes part with scrap, so that no collective is left."""
        size_bytes = payload.sizes_bytes[index]
        bucket: torch.Tensor | None = None
        if failed is None:
            try:
                bucket = _checked(payload.fill(index), size_bytes)
            except Exception as error:
                failed = self._note(error, payload.stage)
        self._broadcast(_scrap(size_bytes, payload.device) if bucket is None else bucket)
        if failed is None and bucket is not None:
            try:
                payload.take(index, bucket)
            except Exception as error:
                failed = self._note(error, payload.stage)
        return failed

    def _note(self, error: Exception, stage: str) -> Exception:
        """Let the source know at once, so that it stops before the payload's end."""
        self._call.state_early(self._failure_of(error, stage))
        return error

    def _failure_of(self, error: Exception, stage: str, *, stuck: bool = False) -> bytes:
        who = self._call.seat.identity
        return statements.failure_bytes(statements.describe_failure(error, who=who, stage=stage, stuck=stuck))

    def _broadcast(self, tensor: torch.Tensor) -> None:
        source = self._source_global_rank
        self._complete(lambda: dist.broadcast(tensor, src=source, group=self._group, async_op=True))

    def _complete(self, begin: Begin) -> None:
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

    def _point_to_point(self, begin: Begin) -> None:
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

    def _blame(self, error: _StuckError) -> SafeLoadError:
        """Find out why a collective broke off: a moment later the watch mostly knows which rank is gone."""
        until = time.monotonic() + _BLAME_S
        while time.monotonic() < until:
            try:
                self._call.check()
            except SafeLoadError as agreed:
                return agreed
            time.sleep(0.05)
        return PeerError(str(error), failures={self._call.seat.identity.global_rank: str(error)})


def _wait_for(begin: Begin, ended: Future[None]) -> None:
    try:
        work = begin()
        if work is not None:
            work.wait()
    except Exception as error:
        ended.set_exception(error)
    else:
        ended.set_result(None)


def _scrap(size_bytes: int, device: str | torch.device) -> torch.Tensor:
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # no memory left: this rank can not take part any more
        raise _StuckError(str(error)) from error


def _checked(tensor: torch.Tensor, size_bytes: int) -> torch.Tensor:
    if tensor.dtype != torch.uint8 or tensor.shape != (size_bytes,) or not tensor.is_contiguous():
        got = f"{tensor.dtype} {list(tensor.shape)}, {'' if tensor.is_contiguous() else 'not '}contiguous"
        raise GroupError(f"a transfer takes contiguous uint8 tensors of shape [{size_bytes}], got {got}")
    return tensor


def _windows(sizes_bytes: Sequence[int], ranks: int) -> Iterator[list[int]]:
    longest_bytes = min(_WINDOW_BYTES + ranks * _RANK_WINDOW_BYTES, _LONGEST_WINDOW_BYTES)
    window: list[int] = []
    window_bytes = 0
    for index, size_bytes in enumerate(sizes_bytes):
        if window and window_bytes + size_bytes > longest_bytes:
            yield window
            window, window_bytes = [], 0
        window.append(index)
        window_bytes += size_bytes
    if window:
        yield window
