"""What a group of ranks can do, and the group of one, for which all of it is easy.

The ranks in here are ranks in the group; those in errors are global ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Final, TypeVar

import torch

from safeload import statements
from safeload.errors import PeerError
from safeload.promising import Promise
from safeload.watching import identify

__all__ = ["Group"]

T = TypeVar("T")
_ALONE: Final = timedelta(days=1)  # one process waits for itself


class Group:
    """A group of ranks that load together; this class itself is the group of one.

    Attributes:
        rank: This process's rank in the group.
        size: Number of ranks.
        source_rank: Rank in the group that reads.
        global_rank: This process's rank in the whole job.
        host: Name of this host.
        hosts: Ranks (in the group) by host, in rank order: those of one tuple share a kernel, pids and memory.
        devices: Types of device whose tensors `stream` takes, the cpu first.
    """

    def __init__(self, *, global_rank: int = 0, timeout: timedelta | None = None) -> None:
        self._until = None if timeout is None else time.monotonic() + timeout.total_seconds()
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
        self._until = None  # what is read on behind the call has a promise's time

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

    def check(self, doing: str = "") -> None:
        """Raise if the stage is known to have failed elsewhere, or the time is over. Cheap; for long work in a stage.

        Args:
            doing: What this rank does or waits for, to be told should its time be over.

        Raises:
            SafeLoadError: What the others raise as well.
        """
        if self._until is not None and time.monotonic() >= self._until:
            text = f"still at work: {doing}" if doing else "still at work"
            what = f"the load did not end within its `timeout`: rank {self.global_rank} {text}"
            raise PeerError(what, rank=self.global_rank, host=self.host, failures={self.global_rank: text})

    def among(self, ranks: Sequence[int]) -> Group:
        """Return the group of some of these ranks, to be entered with `with`; the first of them is its source.

        Args:
            ranks: In this group.

        Ranks: called on those ranks alone, all of them, in the same order.
        """
        return self

    def promise(self) -> Promise:
        """Make a promise of the source rank, which the others may wait for at any time, also after this call.

        Ranks: called on every rank of the group.
        """
        return Promise(None, promiser=None, is_ours=True, readers=0, timeout=_ALONE)

    def stream(
        self,
        stage: str,
        sizes_bytes: Sequence[int],
        fill: Callable[[int], torch.Tensor],
        take: Callable[[int, torch.Tensor], None],
        *,
        ready: Callable[[int], None] = lambda index: None,
        device: str | torch.device = "cpu",
    ) -> None:
        """Broadcast buckets one after another; a failure on a living rank stops all of them in step.

        Args:
            stage: Name of the stage, for errors.
            sizes_bytes: Size of each bucket, the same on every rank.
            fill: From the number of a bucket to its tensor: `[size]` uint8, holding the bytes on the source, and to be
                received into on the others.
            take: Called with number and tensor once the bytes are there, on every rank.
            ready: On the source: waits until `fill` of a bucket need not; for longer than the group's timeout, too.
            device: Where the buckets are.

        Raises:
            SafeLoadError: As in `agree`. Where all ranks live, no collective is left unfinished.

        Ranks: called on every rank of the group.
        """

        def run() -> None:
            for index in range(len(sizes_bytes)):
                ready(index)
                take(index, fill(index))

        self.agree(stage, run)
