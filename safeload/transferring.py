"""Moving bytes over the process group's collectives, with an eye on the peers.

Receives uint8 tensors of known size; gives them filled, or the call's one error. A collective is polled, never waited
for blindly: a lost rank would leave the others in it for the process group's own timeout. Where all ranks live, every
collective that was begun is ended on every rank, so that the process group works again after a failure.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from safeload import statements
from safeload.agreeing import Call
from safeload.errors import GroupError
from safeload.joining import Members
from safeload.waiting import Workers, wait_for

if TYPE_CHECKING:
    from torch.distributed import Work

__all__ = ["Payload", "Transfers"]

_WINDOW_BYTES: Final = 64 * 1024**2  # at least, sent for one `go`: the source has all of it when the others go in
_LONGEST_WINDOW_BYTES: Final = 1024**3  # at most: the others learn of a failure after this much more
_RANK_WINDOW_BYTES: Final = 1024**2  # more for each rank, as each `go` is asked for by all of them
_RUNNING: Final = 2  # buckets on their way at a time: half as much time as one after the other, no more memory than two
# Shortest and longest pause between two looks at a running collective. A bucket takes 3 ms at 100 Gbit/s and more than
# that elsewhere, and the next one is on its way meanwhile, so that a look which comes late leaves no gap. A look that
# comes sooner takes the interpreter from the threads that read and hash.
_POLL_S: Final = (0.001, 0.002)


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
        members: Whose they are.
        call: The call they belong to.
        source_rank: Rank in the group that sends.
    """

    def __init__(self, members: Members, call: Call, source_rank: int) -> None:
        self._members, self._call, self._source_rank = members, call, source_rank
        self._beginner = Workers(1, name="safeload-begin")

    def close(self) -> None:
        """End what the call needed; a thread that is stuck in the beginning of a collective is left behind."""
        self._beginner.close(patience_s=0.1)

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
                failed = self._move(payload, window, failed)
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

    def _move(self, payload: Payload, window: Sequence[int], failed: Exception | None) -> Exception | None:
        """Send or receive the buckets of a window, the next one on its way while one arrives.

        A rank that has failed takes part with scrap, so that no collective is left.
        """
        running: deque[tuple[int, torch.Tensor, Work | None]] = deque()

        def end_first() -> None:
            nonlocal failed
            index, bucket, work = running.popleft()
            self._end(work)
            failed = self._take(payload, index, bucket) if failed is None else failed

        for index in window:
            bucket = None
            if failed is None:
                bucket, failed = self._fill(payload, index)
            wire = _scrap(payload.sizes_bytes[index], payload.device) if bucket is None else bucket
            running.append((index, wire, self._begin(wire)))
            if len(running) == _RUNNING:
                end_first()
        while running:
            end_first()
        return failed

    def _fill(self, payload: Payload, index: int) -> tuple[torch.Tensor | None, Exception | None]:
        try:
            return _checked(payload.fill(index), payload.sizes_bytes[index]), None
        except Exception as error:
            return None, self._note(error, payload.stage)

    def _take(self, payload: Payload, index: int, bucket: torch.Tensor) -> Exception | None:
        try:
            payload.take(index, bucket)
        except Exception as error:
            return self._note(error, payload.stage)
        return None

    def _note(self, error: Exception, stage: str) -> Exception:
        """Let the source know at once, so that it stops before the payload's end."""
        self._call.state_early(self._failure_of(error, stage))
        return error

    def _failure_of(self, error: Exception, stage: str, *, stuck: bool = False) -> bytes:
        who = self._call.seat.identity
        return statements.failure_bytes(statements.describe_failure(error, who=who, stage=stage, stuck=stuck))

    def _begin(self, tensor: torch.Tensor) -> Work | None:
        """Begin a collective. On an accelerator that may block, as NCCL connects to the others in its first ones."""
        try:
            if tensor.device.type == "cpu":  # gloo and MPI only queue it
                return self._members.begin(tensor, self._source_rank)
            enter = _stream_of(tensor.device)

            def begin() -> Work | None:
                enter()
                return self._members.begin(tensor, self._source_rank)

            doing = f"a collective on {tensor.device} begins"
            return wait_for(self._beginner.submit(begin), check=self._call.check, doing=lambda: doing)
        except RuntimeError as error:
            raise _StuckError(f"a transfer broke off: {error}") from error

    def _end(self, work: Work | None) -> None:
        pause_s = _POLL_S[0]
        try:
            while work is not None and not work.is_completed():
                self._call.check()
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _POLL_S[1])
            if work is not None:
                work.wait()
        except RuntimeError as error:  # what the backends raise when a peer's connection is gone or too slow
            raise _StuckError(f"a transfer broke off: {error}") from error


def _stream_of(device: torch.device) -> Callable[[], None]:
    """Return what makes another thread use this one's device and stream: a collective comes after what is on it."""
    if not torch.accelerator.is_available() or torch.accelerator.current_accelerator() != torch.device(device.type):
        return lambda: None
    stream = torch.accelerator.current_stream(device)
    return lambda: torch.accelerator.set_stream(stream)


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
