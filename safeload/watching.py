"""Who is alive: what each rank says about itself, and how the others notice that it is gone.

Receives the members' identities over the control store; gives, a rank, the reason why it is held to be lost.
- A process on the same kernel is looked at directly: when it has ended it is lost at once, and while it lives it is
  never lost, however silent it is (stopped, or busy with the interpreter lock held).
- A process elsewhere is lost when its heartbeats stand still for `SILENT_BEATS` looks in a row, about 6 s. A neighbour
  on its own host vouches for it, so that only a host with one rank needs the rank itself to be responsive.
Looks are counted, not seconds: an observer that was stopped or starved itself must not take others for lost.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from safeload.wiring import Store

__all__ = ["Identity", "Seat", "Watch", "identify", "process_state"]

BEAT_S: Final = 1.0
SILENT_BEATS: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One rank as the others see it. `kernel` is equal exactly where pids and memory can be shared."""

    global_rank: int
    pid: int
    started: int | None
    kernel: str
    host: str

    def to_bytes(self) -> bytes:
        """Return the identity as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> Identity:
        """Read what `to_bytes` wrote."""
        return cls(**json.loads(raw))

    def where(self) -> str:
        """Say which process on which host this is."""
        return f"pid {self.pid} on {self.host}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """This process's place in a call."""

    rank: int
    global_ranks: tuple[int, ...]
    identity: Identity

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.global_ranks)


def identify(global_rank: int) -> Identity:
    """Describe this process.

    Args:
        global_rank: Its rank in the whole job.

    Returns:
        The record that peers watch it by.
    """
    pid = os.getpid()
    started, _ = _stat(pid) or (None, "")
    return Identity(global_rank=global_rank, pid=pid, started=started, kernel=_kernel(), host=socket.gethostname())


@functools.cache
def _kernel() -> str:
    """Name the kernel and the namespaces: two containers on one machine see neither each other's pids nor sockets."""
    parts = [socket.gethostname(), _read("/proc/sys/kernel/random/boot_id")]
    for kind in ("pid", "net"):
        try:
            parts.append(os.readlink(f"/proc/self/ns/{kind}"))
        except OSError:
            parts.append("")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _stat(pid: int) -> tuple[int, str] | None:
    """Return start time (in clock ticks since boot) and state letter of a process, None where /proc does not say."""
    _, _, rest = _read(f"/proc/{pid}/stat").rpartition(") ")
    fields = rest.split()
    return (int(fields[19]), fields[0]) if len(fields) > 19 else None  # noqa: PLR2004 (proc_pid_stat(5))


def process_state(identity: Identity) -> str:
    """Look at a process of this kernel.

    Args:
        identity: The process; its start time tells it from a later one with the same pid.

    Returns:
        "running", "stopped" (by a signal or a debugger) or "ended".
    """
    if identity.started is None:  # no /proc on this system
        return "running" if _signal_reaches(identity.pid) else "ended"
    seen = _stat(identity.pid)
    if seen is None or seen[0] != identity.started or seen[1] in "ZX":
        return "ended"
    return "stopped" if seen[1] in "Tt" else "running"


def _signal_reaches(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class Watch:
    """Beats for this rank and looks at the others. All methods run on the control thread.

    Args:
        rank: This process's rank in the group.
        identity: This process.
        remembered: Identities of the members at the last call, for those that do not come to this one.
    """

    def __init__(self, rank: int, identity: Identity, remembered: dict[int, Identity]) -> None:
        self._rank, self._identity = rank, identity
        self._remembered = remembered
        self._watched: set[int] = set()
        self._neighbour: int | None = None
        self._beats: dict[int, tuple[int, int]] = {}  # rank: the last count seen, and looks since it changed
        self._due = 0.0
        self.known: dict[int, Identity] = {rank: identity}
        self.lost: dict[int, str] = {}

    def follow(self, ranks: Iterable[int], *, neighbour: int | None = None) -> None:
        """Choose whom to look at, and for whom to vouch."""
        self._watched = set(ranks) - {self._rank}
        self._neighbour = neighbour

    def enter(self, store: Store) -> None:
        """Make this rank known. The first beat comes before the identity: who is known has beaten."""
        store.add(f"beat/{self._rank}", 1)
        store.set(f"id/{self._rank}", self._identity.to_bytes())

    def learn(self, store: Store, ranks: Iterable[int]) -> None:
        """Read who these ranks are, now that they are there: where the store is lost as well, it is too late to ask."""
        for rank in ranks:
            self._identify(store, rank)

    def look(self, store: Store) -> None:
        """Beat if due, and look at everybody who is watched; what is found is in `known` and `lost`."""
        due = time.monotonic() >= self._due
        if due:
            self._due = time.monotonic() + BEAT_S
            self._beat(store)
        for rank in sorted(self._watched - set(self.lost)):
            reason = self._look_at(store, rank, count=due)
            if reason is not None:
                self.lost[rank] = reason

    def describe(self, rank: int) -> str:
        """Say what is known about a rank that is waited for."""
        who = self.known.get(rank)
        if who is None:
            return "never came"
        if not self._is_here(who):
            return f"silent ({who.where()})"
        return f"silent ({who.where()}, {process_state(who)})"

    def find_ended(self) -> dict[int, str]:
        """Look for members of this kernel that have ended, without the store; a dying process is given a second."""
        until = time.monotonic() + BEAT_S
        others = self._remembered | self.known
        here = {rank: who for rank, who in others.items() if rank != self._rank and self._is_here(who)}
        while True:
            ended = {rank: _lost_text(who) for rank, who in here.items() if process_state(who) == "ended"}
            if ended or not here or time.monotonic() >= until:
                return dict(self.lost) | ended
            time.sleep(0.05)

    def _is_here(self, who: Identity) -> bool:
        return who.kernel == self._identity.kernel

    def _beat(self, store: Store) -> None:
        store.add(f"beat/{self._rank}", 1)
        neighbour = self._identify(store, self._neighbour) if self._neighbour is not None else None
        if neighbour is not None and process_state(neighbour) != "ended":
            store.add(f"beat/{self._neighbour}", 1)

    def _identify(self, store: Store, rank: int) -> Identity | None:
        if rank not in self.known and store.check([f"id/{rank}"]):
            self.known[rank] = Identity.from_bytes(store.get(f"id/{rank}"))
        return self.known.get(rank) or self._remembered.get(rank)

    def _look_at(self, store: Store, rank: int, *, count: bool) -> str | None:
        who = self._identify(store, rank)
        if who is None:
            return None
        if self._is_here(who):
            return _lost_text(who) if process_state(who) == "ended" else None
        if not count or rank not in self.known:
            return None
        beat = store.add(f"beat/{rank}", 0)
        last, looks = self._beats.get(rank, (beat, 0))
        looks = looks + 1 if beat == last else 0
        self._beats[rank] = (beat, looks)
        if looks < SILENT_BEATS:
            return None
        return f"lost: no heartbeat for {looks * BEAT_S:.0f} s ({who.where()})"


def _lost_text(who: Identity) -> str:
    return f"lost: its process ({who.where()}) has ended"
