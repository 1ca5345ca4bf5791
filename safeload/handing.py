"""Hand open descriptors to other processes of the same kernel, also in other PID namespaces and without `/proc`.

An `Offer` listens on a Unix socket with a random name in the kernel's own (abstract) name space and sends its
descriptors (SCM_RIGHTS) to whoever knows the name and runs as the same user. What arrives is the very file that was
offered, not a name by which another one could be found.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final

from safeload.errors import GroupError

__all__ = ["Offer", "node_key", "take"]

_BATCH: Final = 200  # the kernel takes 253 in one message
_POLL_S: Final = 0.2
_PATIENCE_S: Final = 30.0  # for one receiver that has connected
_TAKE_TIMEOUT: Final = timedelta(seconds=30)


def node_key() -> str:
    """Return a text that is equal on two processes where descriptors can go from one to the other.

    That is: one kernel (boot id) and one network name space, to which abstract socket names belong.

    Ranks: local.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return f"alone {socket.gethostname()} {os.getpid()} {secrets.token_hex(8)}"


class Offer:
    """Sends descriptors to every process that asks for them, until it is closed; a context manager.

    Args:
        fds: Must stay open until then.
    """

    def __init__(self, fds: Sequence[int]) -> None:
        self._fds = tuple(fds)
        self.address = f"safeload-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self.address}")
        self._listener.listen(128)
        self._listener.settimeout(_POLL_S)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="safeload-offer", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._closing.is_set():
            with contextlib.suppress(TimeoutError, OSError):
                connection, _ = self._listener.accept()
                with connection:
                    connection.settimeout(_PATIENCE_S)
                    if not self._closing.is_set() and _is_same_user(connection):
                        self._send(connection)

    def _send(self, connection: socket.socket) -> None:
        for begin in range(0, len(self._fds), _BATCH):
            socket.send_fds(connection, [b"."], self._fds[begin : begin + _BATCH])

    def close(self) -> None:
        """Stop; descriptors that were handed over stay valid."""
        self._closing.set()
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as wake:
            wake.setblocking(False)
            wake.connect(f"\0{self.address}")  # after a shutdown `accept` spins until its time is over
        self._thread.join(timeout=_PATIENCE_S)
        self._listener.close()

    def __enter__(self) -> Offer:
        """Return itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close."""
        self.close()


def _is_same_user(connection: socket.socket) -> bool:
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(user == os.geteuid())


def take(address: str, count: int, *, timeout: timedelta = _TAKE_TIMEOUT) -> list[int]:
    """Receive the descriptors of an `Offer`.

    Args:
        address: Its address.
        count: How many it offers.
        timeout: Longest wait.

    Returns:
        The descriptors; the caller closes them.

    Raises:
        GroupError: It could not be reached from here, or sent something else.
    """
    fds: list[int] = []
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout.total_seconds())
            connection.connect(f"\0{address}")
            while len(fds) < count and time.monotonic() < deadline:
                data, received, _, _ = socket.recv_fds(connection, 1, _BATCH)
                fds += received
                for fd in received:
                    os.set_inheritable(fd, False)  # recv_fds of Python drops its flags, MSG_CMSG_CLOEXEC too
                if not data:
                    break
    except OSError as error:
        _close(fds)
        raise GroupError(f"the node's memory could not be taken over: {error}") from error
    if len(fds) != count:
        _close(fds)
        raise GroupError(f"the node's memory could not be taken over: {len(fds)} of {count} descriptors came")
    return fds


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
