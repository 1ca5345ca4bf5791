"""Agreement over the store: one call of a group, stage by stage, with one verdict a stage.

Receives a store, this rank's place and what it has to say; gives the verdict of each stage, the same on every rank.
Promises: no rank waits inside a collective for another's work; a failure anywhere becomes the verdict of the stage that
everybody waits for; a rank that is lost or silent is named; a rank that comes late to a failed call finds its verdict
and is in step for the next one; when the last rank has left, no key of the call is in the store.

One rank, the judge, gathers the statements of a stage and writes the verdict; the cost is one key a rank and stage, not
one for each pair. The verdict is written by compare-and-set, so that a judge that is late or lost can be overruled
once, for everybody. Group rank 0 judges "join", where ranks may not yet agree on the source; then the source does.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Final

from safeload import clearing, statements
from safeload.blaming import Scene, blame_peers, blame_silence, blame_trouble
from safeload.errors import SafeLoadError
from safeload.signalling import ControlLine, StoreLost, T, wait_for_keys
from safeload.statements import Failure, failure_bytes, is_failure, payload_bytes
from safeload.watching import Identity, Seat, Watch
from safeload.wiring import Store

__all__ = ["Call"]

_LOG: Final = logging.getLogger("safeload")
_TELL_S: Final = 30.0  # a rank that has not come by then may never do so: whoever watches is told whom all wait for
_GRACE_S: Final = 0.5  # from the first trouble to the verdict: lets the others say theirs, for one choice of the error
_STUCK_GRACE_S: Final = 7.5  # a transfer broke off and nobody is known to be lost yet
_MARGIN_S: Final = 2.0  # how much longer than the judge the others wait, so that its verdict comes first
_LINGER_S: Final = 4.0  # how long a rank that leaves waits for the others to have read: its process may host the store

Decide = Callable[[tuple[bytes, ...]], bytes]


class Call:
    """One call of a group over its store.

    Args:
        store: Under a prefix that belongs to this call alone.
        seat: This process's place.
        timeout: For the ranks to come, and again for all that follows.
        remembered: Identities from the call before.

    Ranks: every rank of the group, with the same sequence of stages.
    """

    def __init__(self, store: Store, seat: Seat, *, timeout: timedelta, remembered: dict[int, Identity]) -> None:
        self.seat = seat
        self._timeout_s = timeout.total_seconds()
        self._judge = 0
        self._index, self._stage = 0, "join"
        self._waiting = True  # the caller's thread does the looking itself, in the slices of its wait
        self._draining = False  # in lock-step collectives: only a lost rank may end the stage early
        self._announced = False
        self._held = False
        self._left = False
        self._deadline = time.monotonic() + self._timeout_s
        self._tell_at = time.monotonic() + _TELL_S
        self._trouble_since: float | None = None
        self._go_count = 0
        self._gathered = 0  # the last stage that every rank is known to have come to
        self._early: bytes | None = None
        self._doing = ""
        self._gone: Failure = {}
        self.agreed: SafeLoadError | None = None  # the error that this call ended with, the same on every rank
        self.watch = Watch(seat.rank, seat.identity, remembered)
        self.watch.follow(range(seat.size) if seat.rank == 0 else [0])
        self._line = ControlLine(store, self._tick)

    # --- the stages ---

    @property
    def judges(self) -> bool:
        """Whether this rank writes the verdicts."""
        return self.seat.rank == self._judge

    @property
    def flagged(self) -> bool:
        """Whether some rank is known to have failed in this stage. It may take a second to be known."""
        return self._early is not None or self._trouble_since is not None

    def enter(self) -> None:
        """Make this rank known to the others."""
        self._ask(self.watch.enter)

    def follow_source(self, source_rank: int, *, neighbour: int | None) -> None:
        """Make the source the judge, once every rank is there, and start the clock again."""
        self._judge = source_rank
        self.watch.follow(range(self.seat.size) if self.judges else [source_rank], neighbour=neighbour)
        self._ask(lambda store: self.watch.learn(store, {0, source_rank}))
        self._deadline = time.monotonic() + self._timeout_s

    def begin(self, stage: str, *, announced: bool = False, draining: bool = False) -> None:
        """Begin a stage: from here on, what goes wrong elsewhere is noticed behind the caller's work.

        Args:
            stage: Its name, for errors.
            announced: It will end with `announce`, not with `gather`.
            draining: Its collectives run in step: a failure on a living rank ends it at the next `go` only.
        """
        self._stage, self._go_count, self._announced = stage, 0, announced
        self._draining, self._waiting, self._doing = draining, False, ""

    def gather(
        self, statement: bytes, decide: Decide, cause: BaseException | None = None, *, stuck: bool = False
    ) -> bytes:
        """End the stage: every rank states, the judge decides, every rank gets the verdict.

        Args:
            statement: This rank's, from `payload_bytes` or `failure_bytes`.
            decide: On the judge: from all payloads, in rank order, to the payload of the verdict. May raise our errors.
            cause: This rank's own exception.
            stuck: This rank failed inside of a collective, so that the others may be stuck there.

        Raises:
            SafeLoadError: The verdict is a failure.
        """
        self._waiting, self._draining = True, False
        self._state(statement, stuck=stuck)
        payload = self._conclude(functools.partial(self._collect, decide), cause)
        if self.judges:
            first, last, count = self._gathered, self._index - 1, self._go_count
            sweep = functools.partial(clearing.sweep, size=self.seat.size, first=first, last=last, go_count=count)
            self._ask(sweep)
        self._gathered = self._index - 1
        return payload

    def state_early(self, failure: bytes) -> None:
        """State a failure before the stage's end, for `flagged` on the judge; `gather` is to state it again."""
        self._state(failure)

    def announce(self, statement: bytes | None, cause: BaseException | None = None) -> bytes:
        """End the stage by the judge's statement alone; the others only wait for it.

        Args:
            statement: On the judge: its statement. None on the others.
            cause: This rank's own exception.

        Raises:
            SafeLoadError: The verdict is a failure.
        """
        self._waiting = True
        return self._conclude(lambda: statement, cause)

    def check(self, doing: str = "") -> None:
        """Raise if the stage is known to have failed elsewhere; costs nothing. For long work and for polling loops.

        Args:
            doing: What this rank does or waits for, to be told should its time be over.

        Raises:
            SafeLoadError: The stage has failed.
        """
        self._doing = doing or self._doing
        if self._early is not None:
            raise self._failed(self._early, None)
        try:
            self._line.check()
        except StoreLost as error:
            raise self._store_lost(error) from error

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """On the judge: work before the next `go`, while the others are in no collective but wait for this rank."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def go(self, *, stop: bool = False) -> None:
        """On the judge: let the others into the next collectives of this stage, or tell them that none will follow."""
        key, self._go_count = f"go/{self._index}/{self._go_count}", self._go_count + 1
        self._ask(lambda store: store.set(key, b"-" if stop else b"+"))

    def wait_go(self) -> bool:
        """On the others: wait for the judge's `go`; False when none will follow.

        Raises:
            SafeLoadError: The stage failed for good, or the judge is silent or lost.
        """
        key, self._go_count = f"go/{self._index}/{self._go_count}", self._go_count + 1
        self._waiting = True
        try:
            while not self._arrived([key]):
                verdict = self._ask(self._look)
                if verdict is not None:
                    raise self._failed(verdict, None)
            return self._ask(lambda store: store.get(key)) == b"+"
        finally:
            self._waiting = False

    # --- one stage's end ---

    def _conclude(self, collect: Callable[[], bytes | None], cause: BaseException | None) -> bytes:
        verdict = self._early
        if verdict is None:
            proposed = collect() if self.judges else None
            verdict = self._await_verdict() if proposed is None else self._publish(proposed)
        if is_failure(verdict):
            raise self._failed(verdict, cause)
        self._index += 1
        self._waiting = False
        return statements.payload_of(verdict)

    def _arrived(self, keys: list[str]) -> bool:
        return self._ask(functools.partial(wait_for_keys, keys=keys, members=self.seat.size))

    def _state(self, statement: bytes, *, stuck: bool = False) -> None:
        def tell(store: Store) -> None:
            store.set(f"s/{self._index}/{self.seat.rank}", statement)
            if is_failure(statement):
                store.set("flag", "stuck" if stuck else "failed")

        self._ask(tell)

    def _collect(self, decide: Decide) -> bytes | None:
        """Wait for every rank's statement; None when the call failed instead, and `_await_verdict` has the verdict."""
        keys = [f"s/{self._index}/{rank}" for rank in range(self.seat.size)]
        while not self._arrived(keys):
            if self._ask(self._look) is not None:
                return None
        stated = self._ask(lambda store: store.multi_get(keys))
        failures = {rank: json.loads(raw[1:]) for rank, raw in enumerate(stated) if is_failure(raw)}
        if failures:
            return failure_bytes(statements.choose(failures, stage=self._stage))
        try:
            return payload_bytes(decide(tuple(statements.payload_of(raw) for raw in stated)))
        except SafeLoadError as error:
            return failure_bytes(statements.describe_failure(error, who=self.seat.identity, stage=self._stage))

    def _await_verdict(self) -> bytes:
        key = f"v/{self._index}"
        while not self._arrived([key]):
            verdict = self._ask(self._look)
            if verdict is not None:
                return verdict
        return self._ask(lambda store: store.get(key))

    def _publish(self, proposed: bytes) -> bytes:
        key = f"v/{self._index}"
        # An empty expected value means "only if it is not there": whoever was first has said it for all.
        return self._ask(lambda store: store.compare_set(key, "", proposed))

    def _failed(self, verdict: bytes, cause: BaseException | None) -> SafeLoadError:
        if self.agreed is None:
            self._gone = json.loads(verdict[1:])
            self.agreed = statements.rebuild(self._gone, cause)
        return self.agreed

    # --- what goes on behind; runs on the control thread ---

    def _tick(self, store: Store) -> None:
        self.watch.look(store)
        self._tell_of_absent()
        if self._waiting or self._left or self._early is not None:
            return
        verdict = self._look(store)
        if verdict is not None and is_failure(verdict):
            self._early = verdict

    def _tell_of_absent(self) -> None:
        """Say once whom this rank has been waiting for since the call began."""
        if self._stage != "join" or self._left or time.monotonic() < self._tell_at:
            return
        self._tell_at = float("inf")
        expected = range(self.seat.size) if self.judges else [self._judge]
        absent = [str(self.seat.global_ranks[rank]) for rank in expected if rank not in self.watch.known]
        if absent:
            _LOG.warning(
                "waiting for rank %s, for up to %.0f s in all: every rank has to make the same calls of safeload",
                ", ".join(absent),
                self._timeout_s,
            )

    def _look(self, store: Store) -> bytes | None:
        """Return the stage's verdict if there is one; write it if the stage has failed and it falls to this rank."""
        key = f"v/{self._index}"
        if store.check([key]):
            return store.get(key)
        failure = self._find_trouble(store)
        if failure is None:
            return None
        return store.compare_set(key, "", failure_bytes(failure))

    def _find_trouble(self, store: Store) -> Failure | None:
        now = time.monotonic()
        flag = store.get("flag") if self.judges and store.check(["flag"]) else b""
        if (self.watch.lost or flag) and self._trouble_since is None:
            self._trouble_since = now
        unexplained = flag == b"stuck" and not self.watch.lost  # the watch needs some seconds to find out who is lost
        grace_s = _STUCK_GRACE_S if unexplained else _GRACE_S
        grace_over = self._trouble_since is not None and now - self._trouble_since >= grace_s
        in_collectives = self._draining and not self._held
        if grace_over and (self.watch.lost or flag == b"stuck" or not in_collectives):
            return blame_trouble(store, self._scene())
        if now >= self._deadline + (0 if self.judges else _MARGIN_S):
            silence = blame_silence(store, self._scene())
            if self._trouble_since is None:
                return silence
            return blame_trouble(store, self._scene()) | {"absent": silence["absent"]}  # the failure explains it
        return None

    def _scene(self) -> Scene:
        return Scene(
            seat=self.seat,
            watch=self.watch,
            judge=self._judge,
            index=self._index,
            stage=self._stage,
            announced=self._announced or self._held,
            timeout_s=self._timeout_s,
            doing=self._doing,
        )

    # --- the way out ---

    def give_up(self, error: BaseException, *, wait: bool) -> SafeLoadError | None:
        """Tell the others that this rank failed outside of a stage, and get the verdict that comes of it.

        Args:
            error: What happened here.
            wait: Whether to wait for the verdict; if not, None is returned.
        """
        statement = failure_bytes(statements.describe_failure(error, who=self.seat.identity, stage=self._stage))
        self._waiting = True
        while True:
            try:
                self._state(statement)
                if wait or self.judges:
                    # A verdict of success is one that was announced without asking: state it again, for the next stage.
                    self._conclude(lambda: statement, error)
            except SafeLoadError as agreed:
                return agreed
            if not wait:
                return None

    def leave(self) -> None:
        """Leave the call: wait shortly until the others have read the verdict; the last one out clears the store."""
        self._left = True
        with contextlib.suppress(StoreLost):
            size, failure = self.seat.size, self._gone
            self._line.ask(functools.partial(clearing.say_goodbye, size=size, failure=failure))
            until = time.monotonic() + _LINGER_S
            gone = functools.partial(wait_for_keys, keys=["all-bye"], members=self.seat.size)
            while not self._line.ask(gone) and time.monotonic() < until:
                pass
            stages, count = (self._gathered, self._index), self._go_count
            go = functools.partial(clearing.go, size=size, failure=failure, stages=stages, go_count=count)
            self._line.ask(go)
        self._line.close()

    def _ask(self, operation: Callable[[Store], T]) -> T:
        try:
            return self._line.ask(operation)
        except StoreLost as error:
            raise self._store_lost(error) from error

    def _store_lost(self, error: StoreLost) -> SafeLoadError:
        """Without the store there is no verdict: each rank says what it can see for itself."""
        texts = self.watch.find_ended() or {self._judge: "cut off, or its process has ended"}
        said = {rank: f"{text}; the store does not answer: {error}" for rank, text in texts.items()}
        failure = blame_peers(self._scene(), said)
        self._gone = failure | {"lost": list(range(self.seat.size))}
        self.agreed = statements.rebuild(failure, error)
        return self.agreed
