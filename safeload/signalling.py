"""The control line: one thread that alone talks to the store, so that no caller is ever stuck in it.

Receives a store and a tick; gives `ask(operation)`. The thread runs the operations one after another and the tick
(heartbeats, looks at the peers) between them, also while the caller computes. A store whose host is cut off blocks
for minutes inside one operation: the caller's wait is bounded here, and the thread, a daemon, is left to its fate.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # the builtin one from Python 3.11 on
from typing import Any, Final, TypeVar

from safeload.wiring import Store

__all__ = ["ControlLine", "StoreLost", "wait_for_keys"]

T = TypeVar("T")
_TICK_S: Final = 0.5
_SLICE_S: Final = 0.5
_SHARE_S: Final = 0.00005  # of a second between two questions, for each rank that may be asking
_LAG: Final = 0.05  # an answer is noticed late by at most this part of the wait...
_LONGEST_S: Final = 0.02  # ...and by at most this
_ANSWER_S: Final = 6.0  # a slice and a tick over thousands of ranks stay well below
_AWAKE_S: Final = 1.0  # a thread that seems stuck has so long to move: this whole process may have been stopped


class StoreLost(Exception):
    """The store does not answer, or its host is gone."""


class ControlLine:
    """Runs store operations on a thread of its own.

    Args:
        store: The store, already under the prefix of this call.
        tick: Called on the thread about every half second.
    """

    def __init__(self, store: Store, tick: Callable[[Store], None]) -> None:
        self._store, self._tick = store, tick
        self._asked: queue.SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._broken: Exception | None = None
        self._stuck = self._closed = False
        self._moved = time.monotonic()  # when the thread last was between two operations
        self._suspected = (0.0, 0.0)  # the same, where that was long ago, and since when that is known
        self._thread = threading.Thread(target=self._serve, name="safeload-control", daemon=True)
        self._thread.start()

    def ask(self, operation: Callable[[Store], T]) -> T:
        """Run `operation(store)` on the thread and return its value.

        Args:
            operation: Must not block for more than about a second in a store that answers.

        Raises:
            StoreLost: The store did not answer in time, or its host is gone.
        """
        if self._broken is not None:
            raise StoreLost(str(self._broken)) from self._broken
        future: Future[T] = Future()
        stuck_s = time.monotonic() - self._moved  # in an earlier operation
        self._asked.put((operation, future))
        try:
            return future.result(timeout=max(_AWAKE_S, _ANSWER_S - stuck_s))
        except FutureTimeoutError as error:
            raise self._give_up() from error

    def check(self) -> None:
        """Raise if the store is known to be lost; costs nothing. For a caller that asks nothing for long.

        Raises:
            StoreLost: The thread is stuck in an operation, or its last one failed.
        """
        if self._closed:
            return  # the call is over: what is read on behind it needs the store no more
        if self._broken is not None:
            raise StoreLost(str(self._broken)) from self._broken
        now, moved = time.monotonic(), self._moved
        if now - moved <= _ANSWER_S:
            return
        if self._suspected[0] != moved:
            self._suspected = moved, now
        elif now - self._suspected[1] > _AWAKE_S:
            raise self._give_up()

    def _give_up(self) -> StoreLost:
        self._stuck = True
        self._broken = StoreLost(f"no answer within {_ANSWER_S:.0f} s")
        return self._broken

    def close(self) -> None:
        """End the thread; one that is stuck in a dead store is left behind as a daemon."""
        self._closed = True
        self._asked.put(None)
        if not self._stuck:
            self._thread.join(timeout=_ANSWER_S)

    def _serve(self) -> None:
        due = time.monotonic()
        while True:
            self._moved = now = time.monotonic()
            if now >= due:
                due = now + _TICK_S
                self._guard_tick()
            try:
                asked = self._asked.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                continue
            if asked is None:
                return
            self._moved = time.monotonic()
            _answer(self._store, *asked)

    def _guard_tick(self) -> None:
        if self._broken is None:
            try:
                self._tick(self._store)
            except Exception as error:  # the next question gets the news
                self._broken = error


def _answer(store: Store, operation: Callable[[Store], T], future: Future[T]) -> None:
    try:
        future.set_result(operation(store))
    except RuntimeError as error:
        lost = StoreLost(str(error).split("\n", 1)[0])
        lost.__cause__ = error
        future.set_exception(lost)
    except BaseException as error:
        future.set_exception(error)


def wait_for_keys(store: Store, keys: list[str], *, members: int) -> bool:
    """Wait for keys for one short slice, by asking again and again.

    Not by the store's own `wait`: torch logs a warning for each that ends without the key, twice a second and rank.

    Args:
        store: The store.
        keys: All of them are waited for.
        members: How many ranks may be asking at the same time; all together ask about 20,000 times a second at most.

    Returns:
        Whether all are there.

    Raises:
        RuntimeError: The store's host is gone.
    """
    shortest_s = members * _SHARE_S
    start = time.monotonic()
    while not store.check(keys):
        waited_s = time.monotonic() - start
        if waited_s >= _SLICE_S:
            return False
        time.sleep(max(shortest_s, min(waited_s * _LAG, _LONGEST_S)))
    return True
