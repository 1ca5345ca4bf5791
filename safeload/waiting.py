"""Work that may never come back, as a read of a disk that is gone: done in daemon threads, waited for in slices.

Receives what is to be done, and what to ask meanwhile; gives its result, or raises what the question raised. A thread
that is stuck in the system can not be ended: it is left behind, as a daemon, which keeps no process from ending, and
what it uses stays open until it comes back.
"""

from __future__ import annotations

import contextvars
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Final, TypeVar

__all__ = ["Check", "Workers", "run_beside", "wait_for"]

T = TypeVar("T")
Check = Callable[[str], None]
"""Asked now and then by who waits, with what it waits for; what it raises ends the wait."""

_SLICE_S: Final = 0.2


class Workers:
    """Daemon threads that run one task after another.

    Args:
        count: At most so many; each is started when there is work for it.
        name: Of the threads.
    """

    def __init__(self, count: int, *, name: str) -> None:
        self._count, self._name = count, name
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._running = 0
        self._at_end: Callable[[], object] | None = None

    def submit(self, work: Callable[..., T], *args: Any) -> Future[T]:
        """Run `work(*args)` on one of the threads.

        Args:
            work: What is to be done.
            args: For it.

        Returns:
            Its result, when it is there.
        """
        future: Future[T] = Future()
        self._tasks.put((future, lambda: work(*args)))
        if len(self._threads) < self._count:
            self._start_one()
        return future

    def _start_one(self) -> None:
        thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
        with self._lock:
            self._running += 1
        try:
            thread.start()
        except RuntimeError:  # no room for one more
            with self._lock:
                self._running -= 1
            if not self._threads:
                raise
        else:
            self._threads.append(thread)

    def close(self, *, patience_s: float | None = None) -> bool:
        """End the threads, when they have done what was submitted.

        Args:
            patience_s: How long to wait for them; None is for as long as it takes.

        Returns:
            Whether all have ended.
        """
        for _ in self._threads:
            self._tasks.put(None)
        until = None if patience_s is None else time.monotonic() + patience_s
        for thread in self._threads:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))
        return not self._running

    def when_ended(self, call: Callable[[], object]) -> None:
        """Have the last of the closed threads call this when it ends; call it now if that has happened.

        Args:
            call: What is to be done.
        """
        with self._lock:
            runs = self._running > 0
            self._at_end = call if runs else None
        if not runs:
            call()

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            _run(*task)
            del task  # else the last result lives until the next task
        with self._lock:
            self._running -= 1
            at_end = self._at_end if not self._running else None
        if at_end is not None:
            at_end()


def _run(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def wait_for(future: Future[T], *, check: Check | None = None, doing: Callable[[], str] = str) -> T:
    """Wait for a result.

    Args:
        future: Will have it.
        check: Asked now and then.
        doing: Says what is waited for, for `check`.

    Returns:
        The result; what the work raised is raised.
    """
    while not wait([future], timeout=_SLICE_S).done:
        if check is not None:
            check(doing())
    result: T = future.result()
    return result


def run_beside(work: Callable[[], T], *, check: Check, doing: str, undo: Callable[[T], object] | None = None) -> T:
    """Run something on a thread of its own and wait for it.

    Args:
        work: What is to be done; it sees this thread's context variables.
        check: Asked now and then; what it raises ends the wait, not the work.
        doing: What is waited for, for `check`.
        undo: Called with a result that comes too late.

    Returns:
        The result; what the work raised is raised.
    """
    workers = Workers(1, name="safeload-beside")
    context = contextvars.copy_context()
    future: Future[T] = workers.submit(lambda: context.run(work))
    try:
        return wait_for(future, check=check, doing=lambda: doing)
    except BaseException:
        future.add_done_callback(lambda late: None if late.exception() or undo is None else undo(late.result()))
        raise
    finally:
        workers.close(patience_s=None if future.done() else 0.0)
