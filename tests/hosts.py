"""Several hosts on one machine: network namespaces with addresses of their own, joined by a switch.

    with hosts(2) as cluster:
        run_on_ranks(4, body, **cluster.options(ranks_per_host=2))

A rank on a host sees only that host's network, has the host's name, and does not see the folders that are hidden from
it. Links can be made slow and lossy, and cut. Needs Linux, root and `ip`; tests are skipped with the reason elsewhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Cluster", "hosts"]

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Namespaces by name, each with its address."""

    names: tuple[str, ...]
    addresses: tuple[str, ...]

    def options(
        self,
        *,
        ranks_per_host: int = 2,
        host_of: Sequence[int] | None = None,
        hidden: str | os.PathLike[str] | None = None,
        seen_by: int = 0,
    ) -> dict[str, Any]:
        """Return the options of `run_on_ranks` that place ranks on hosts.

        Args:
            ranks_per_host: For the usual layout, host by host.
            host_of: The host of each rank, for other layouts.
            hidden: A folder that only one host has.
            seen_by: That host.
        """
        places = host_of or [each for each in range(len(self.names)) for _ in range(ranks_per_host)]
        local = [places[:rank].count(host) for rank, host in enumerate(places)]

        def environment(rank: int) -> dict[str, str]:
            return {
                "MASTER_ADDR": self.addresses[places[0]],
                "GLOO_SOCKET_IFNAME": "eth0",
                "LOCAL_RANK": str(local[rank]),
                "LOCAL_WORLD_SIZE": str(places.count(places[rank])),
            }

        before = functools.partial(
            _enter, self.names, tuple(places), None if hidden is None else os.fspath(hidden), seen_by
        )
        return {"store": "tcp", "env": environment, "before": before}

    def cut(self, host: int) -> None:
        """Cut a host off, as a pulled cable does."""
        _ip("-n", self.names[host], "link", "set", "eth0", "down")

    def slow_down(self, host: int, *, rate: str, limit_bytes: int) -> None:
        """Make what a host sends slow; a queue too short for the rate loses packets."""
        shape = ["tbf", "rate", rate, "burst", "16kb", "limit", str(limit_bytes)]
        _run("tc", "-n", self.names[host], "qdisc", "replace", "dev", "eth0", "root", *shape)

    def received_bytes(self, host: int) -> int:
        """Return how many bytes a host's link has received."""
        return int(self._statistic(host, "rx_bytes"))

    def sent_bytes(self, host: int) -> int:
        """Return how many bytes a host's link has sent."""
        return int(self._statistic(host, "tx_bytes"))

    def dropped_packets(self, host: int) -> int:
        """Return how many packets a host's queue has dropped."""
        text = _run("tc", "-n", self.names[host], "-s", "qdisc", "show", "dev", "eth0")
        return int(text.split("dropped ", 1)[1].split(",", 1)[0])

    def _statistic(self, host: int, name: str) -> str:
        return _ip("netns", "exec", self.names[host], "cat", f"/sys/class/net/eth0/statistics/{name}")


@contextlib.contextmanager
def hosts(count: int) -> Iterator[Cluster]:
    """Make `count` hosts; they are gone at the end."""
    _require()
    number = next(_numbers)
    base = f"sl{os.getpid()}n{number}"
    switch, names = f"{base}s", tuple(f"{base}h{host}" for host in range(count))
    addresses = tuple(f"10.{77 + number % 100}.0.{host + 1}" for host in range(count))
    try:
        _add(switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for host, name in enumerate(names):
            _add(name)
            _ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"p{host}", "netns", switch)
            _ip("-n", name, "addr", "add", f"{addresses[host]}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", switch, "link", "set", f"p{host}", "master", "br0", "up")
        yield Cluster(names=names, addresses=addresses)
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _add(name: str) -> None:
    _ip("netns", "add", name)
    _ip("-n", name, "link", "set", "lo", "up")


def _require() -> None:
    if sys.platform != "linux" or shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("network namespaces need Linux and the commands ip and tc (package iproute2)")
    probe = f"sl{os.getpid()}p"
    made = subprocess.run(["ip", "netns", "add", probe], check=False, capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe], check=False, capture_output=True)
    if made.returncode:
        pytest.skip(f"network namespaces are not permitted here: {made.stderr.strip()}")


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _enter(names: tuple[str, ...], places: tuple[int, ...], hidden: str | None, seen_by: int, rank: int) -> None:
    """Move this process to the host of its rank."""
    host = places[rank]
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", names[host]).open() as namespace:
        _check(libc.setns(namespace.fileno(), _CLONE_NEWNET))
    _check(libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS))
    name = f"host{host}".encode()
    _check(libc.sethostname(name, len(name)))
    _check(libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None))
    if hidden is not None and host != seen_by:
        _check(libc.mount(b"none", hidden.encode(), b"tmpfs", 0, None))


def _check(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
