"""Several ranks of one process group meet, agree stage by stage, and part together.

Receives a process group; gives a `Group` whose stages end with one verdict for all (see `agreeing`). One call at a time
a process and group: a second thread waits for its turn, a call within a call (a tower made of towers) is its own call.
"""

# The methods are documented where they are declared, in Group.
# ruff: noqa: D102, D105

from __future__ import annotations

import json
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from safeload import joining, statements, wiring
from safeload.agreeing import Call
from safeload.errors import GroupError
from safeload.grouping import Group
from safeload.joining import Members
from safeload.promising import Promise
from safeload.transferring import Payload, Transfers
from safeload.waiting import run_beside
from safeload.watching import Identity, Seat

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["RankGroup"]

T = TypeVar("T")


@dataclass(slots=True)
class _Past:
    """What one process remembers of a process group between calls; goes with the group."""

    calls: int = 0
    promises: int = 0
    alone: bool = False  # inside of work that only the source does
    lock: threading.RLock = field(default_factory=threading.RLock)  # re-entrant: a tower may be made of towers
    known: dict[int, Identity] = field(default_factory=dict)


_pasts: weakref.WeakKeyDictionary[Any, _Past] = weakref.WeakKeyDictionary()
_pasts_lock = threading.Lock()


class RankGroup(Group):
    """Several ranks of one process group."""

    def __init__(
        self,
        members: Members,
        past: _Past,
        *,
        source_rank: int,
        timeout: timedelta,
        outer: RankGroup | None = None,
        refusal: GroupError | None = None,
    ) -> None:
        super().__init__(global_rank=members.global_ranks[members.rank])
        self._members, self._past, self._timeout, self._outer = members, past, timeout, outer
        self.rank, self.size, self.source_rank = members.rank, len(members.global_ranks), source_rank
        self._seat = Seat(rank=self.rank, global_ranks=members.global_ranks, identity=self._identity)
        self.devices = members.devices
        self._refusal = refusal
        self._parts: Counter[tuple[int, ...]] = Counter()
        self._call: Call
        self._transfers: Transfers

    @classmethod
    def of(
        cls, group: ProcessGroup, *, source_rank: int, timeout: timedelta, refusal: GroupError | None = None
    ) -> RankGroup:
        """Return the members of a process group; see `join_group`. `refusal` is told to them instead of loading."""
        with _pasts_lock:
            past = _pasts.setdefault(group, _Past())
        members = joining.members_of(group, timeout=timeout)
        return cls(members, past, source_rank=source_rank, timeout=timeout, refusal=refusal)

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
        if self._past.alone:
            self._past.lock.release()
            raise GroupError(
                "a load inside of another load's work that only the source does: the other ranks can not take part. "
                "A tower whose constructor loads towers of its own must be built by every rank: load the inner ones "
                "first and pass them in, or build the outer one without safe_from_pretrained",
                rank=self.global_rank,
            )
        try:
            store = wiring.call_store(self._members.open_store(), self._seat.global_ranks, self._past.calls)
            self._past.calls += 1  # also for a call that fails: its number is used up on every rank
            self._call = Call(store, self._seat, timeout=self._timeout, remembered=self._past.known)
            self._transfers = Transfers(self._members, self._call, self.source_rank)
            try:
                self._meet()
            except BaseException as error:
                raise self._depart(error) from error.__cause__
        except BaseException:
            self._past.lock.release()
            self._members.close()
            raise
        return self

    def _meet(self) -> None:
        self._call.enter()
        if self._refusal is not None:
            raise self._refusal
        mine = {"source_rank": self.source_rank, "who": self._identity.to_bytes().decode()}
        raw = self._call.gather(statements.payload_bytes(json.dumps(mine).encode()), self._decide_join)
        self.hosts = tuple(tuple(ranks) for ranks in json.loads(raw))
        mates = next(ranks for ranks in self.hosts if self.rank in ranks)
        neighbour = mates[(mates.index(self.rank) + 1) % len(mates)]
        self._call.follow_source(self.source_rank, neighbour=None if neighbour == self.rank else neighbour)

    def _decide_join(self, payloads: tuple[bytes, ...]) -> bytes:
        said = [json.loads(raw) for raw in payloads]
        statements.compare([{"source_rank": str(each["source_rank"])} for each in said], self._seat.global_ranks)
        who = [Identity.from_bytes(each["who"].encode()) for each in said]
        self._call.watch.known.update(enumerate(who))  # so that the next call knows who has ended before it
        hosts: dict[str, list[int]] = {}
        for rank, each in enumerate(who):
            hosts.setdefault(each.kernel, []).append(rank)
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
            self._transfers.close()
            self._members.close()

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
        self._call.gather(statement, self._decide_start)

    def _decide_start(self, payloads: tuple[bytes, ...]) -> bytes:
        statements.compare([json.loads(raw) for raw in payloads], self._seat.global_ranks)
        return b""

    def agree(self, stage: str, fn: Callable[[], T]) -> T:
        self._call.begin(stage)
        value, statement, cause = self._attempt(stage, fn)
        self._call.gather(statement, lambda _: b"", cause)
        return value

    def on_source(self, stage: str, fn: Callable[[], T]) -> T | None:
        self._call.begin(stage, announced=True)
        if not self.is_source:
            self._call.announce(None)
            return None
        self._past.alone = True
        try:
            value, statement, cause = self._attempt(stage, fn)
        finally:
            self._past.alone = False
        self._call.announce(statement, cause)
        return value

    def send_bytes(self, stage: str, payload: bytes | None) -> bytes:
        self._call.begin(stage, announced=True)
        return self._call.announce(statements.payload_bytes(payload or b"") if self.is_source else None)

    def gather_bytes(self, stage: str, payload: bytes) -> tuple[bytes, ...]:
        self._call.begin(stage)
        return statements.unpack(self._call.gather(statements.payload_bytes(payload), statements.pack))

    def check(self, doing: str = "") -> None:
        if self._outer is not None:  # its other members wait, too
            self._outer.check(doing)
        self._call.check(doing)

    def _attempt(self, stage: str, fn: Callable[[], T]) -> tuple[T, bytes, Exception | None]:
        try:
            return fn(), statements.payload_bytes(b""), None
        except Exception as error:
            # No value: the caller raises before it would use it.
            failure = statements.describe_failure(error, who=self._identity, stage=stage)
            return None, statements.failure_bytes(failure), error  # type: ignore[return-value]

    # --- payload ---

    def among(self, ranks: Sequence[int]) -> Group:
        key = tuple(self._seat.global_ranks[rank] for rank in ranks)
        number = f"{self._past.calls}.{self._parts[key]}"  # of the call, and in it: the same on all of them
        self._parts[key] += 1
        store = wiring.call_store(self._members.open_store(), key, number, kind="part")
        members = run_beside(
            lambda: joining.part_of(key, self.global_rank, store, timeout=self._timeout),
            check=self.check,
            doing=f"ranks {', '.join(map(str, key))} connect",
            undo=lambda late: late.close(),
        )
        source_rank = members.global_ranks.index(key[0])
        return RankGroup(members, _Past(), source_rank=source_rank, timeout=self._timeout, outer=self)

    def promise(self) -> Promise:
        number, self._past.promises = self._past.promises, self._past.promises + 1
        store = wiring.call_store(self._members.open_store(), self._seat.global_ranks, number, kind="promise")
        raw = self.send_bytes("promise", self._identity.to_bytes() if self.is_source else None)
        promiser = Identity.from_bytes(raw)
        can_look = promiser.kernel == self._identity.kernel  # at its process, whether it lives
        return Promise(
            wiring.own_line(store),
            promiser=promiser if can_look else None,
            is_ours=self.is_source,
            readers=self.size - 1,
            timeout=self._timeout,
        )

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
        self.agree(stage, lambda: None)  # everybody is here, or nobody enters a collective
        self._transfers.stream(
            Payload(stage=stage, sizes_bytes=sizes_bytes, fill=fill, take=take, ready=ready, device=device)
        )
