"""A word that one rank gives later, and the others read when they need it: the verdict at a tower's first use.

It goes through the group's store, not through a collective: nobody has to come for it at the same time, and a rank that
never needs it never waits. Whoever waits looks at whether the promising process is still alive.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final

from safeload.errors import PeerError, SafeLoadError
from safeload.statements import rebuild
from safeload.watching import Identity, identify, process_state
from safeload.wiring import Store

__all__ = ["Promise"]

_POLL_S: Final = (0.001, 0.05)
_KEY: Final = "verdict"
_READ: Final = "verdict-read"


class Promise:
    """What the promising rank keeps and the others wait for; JSON values, or an error.

    Args:
        store: Of this promise alone; None where one process is on its own.
        promiser: The process that keeps it; None where that is not known.
        is_ours: Whether this process keeps it.
        readers: How many processes will read it; the last one clears it away.
        timeout: Longest wait.
    """

    def __init__(
        self, store: Store | None, *, promiser: Identity | None, is_ours: bool, readers: int, timeout: timedelta
    ) -> None:
        self._store, self._promiser, self._is_ours = store, promiser, is_ours
        self._readers, self._timeout_s = readers, timeout.total_seconds()
        self._kept = threading.Event()
        self._said: dict[str, Any] = {}

    def keep(self, work: Callable[[], Mapping[str, Any]]) -> None:
        """Do the work and give the word: what it returned, or what it raised. On the promising rank, in any thread."""
        try:
            self._said = {"value": dict(work())}
        except SafeLoadError as error:
            self._said = {"error": error.to_fields()}
        except Exception as error:
            rank = identify(-1 if self._promiser is None else self._promiser.global_rank).global_rank
            text = f"{type(error).__name__}: {error}"
            lost = PeerError(f"the tower could not be verified: {text}", rank=rank, failures={rank: text})
            self._said = {"error": lost.to_fields()}
        try:
            if self._store is not None:
                self._store.set(_KEY, json.dumps(self._said))
        finally:
            self._kept.set()

    def wait(self) -> Mapping[str, Any]:
        """Wait for the word.

        Returns:
            What was promised.

        Raises:
            SafeLoadError: What the work raised, with class and data; the same on every rank.
            PeerError: The promising process is gone, or silent for too long.

        Ranks: any, at any time.
        """
        if not self._kept.is_set():
            if self._is_ours or self._store is None:
                self._kept.wait(self._timeout_s)
            else:
                self._said = json.loads(self._await(self._store))
                self._clear(self._store)
                self._kept.set()
        if "error" in self._said:
            raise rebuild({"error": self._said["error"]})
        if "value" not in self._said:
            raise self._lost(f"is silent for {self._timeout_s:.0f} s")
        value: Mapping[str, Any] = self._said["value"]
        return value

    def _await(self, store: Store) -> bytes:
        deadline, pause_s = time.monotonic() + self._timeout_s, _POLL_S[0]
        try:
            while not store.check([_KEY]):
                if self._promiser is not None and process_state(self._promiser) == "ended" and not store.check([_KEY]):
                    raise self._lost("has ended")
                if time.monotonic() > deadline:
                    raise self._lost(f"is silent for {self._timeout_s:.0f} s")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _POLL_S[1])
            return store.get(_KEY)
        except RuntimeError as error:  # the process that hosts the store has ended
            raise self._lost("cannot be asked any more, its store is gone") from error

    def _clear(self, store: Store) -> None:
        if store.add(_READ, 1) == self._readers:
            store.delete_key(_KEY)
            store.delete_key(_READ)

    def _lost(self, what: str) -> PeerError:
        rank = -1 if self._promiser is None else self._promiser.global_rank
        return PeerError(
            f"the tower was not verified before its first use: the source rank {rank} {what}. Load it again.",
            stage="verify",
            failures={rank: what},
        )
