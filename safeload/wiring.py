"""Where a process group's members can meet outside of its collectives: the group's store.

All private API of torch.distributed is in `private_store`. Where it has moved, `own_store` makes a store by public
means: the group's first rank serves a TCPStore and its address goes out in one public collective.
"""

from __future__ import annotations

import hashlib
import os
import socket
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Store", "call_store", "control_store", "device_types", "own_line", "own_store", "private_store"]


class Store(Protocol):
    """What we use of torch's stores (whose types torch does not export)."""

    def set(self, key: str, value: str | bytes) -> None: ...  # noqa: D102
    def get(self, key: str) -> bytes: ...  # noqa: D102
    def add(self, key: str, value: int) -> int: ...  # noqa: D102
    def check(self, keys: list[str]) -> bool: ...  # noqa: D102
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...  # noqa: D102
    def multi_get(self, keys: list[str]) -> list[bytes]: ...  # noqa: D102
    def compare_set(self, key: str, expected_value: str, desired_value: str | bytes) -> bytes: ...  # noqa: D102
    def delete_key(self, key: str) -> bool: ...  # noqa: D102


_ADDRESS_BYTES: Final = 256
_own_stores: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def call_store(store: Store, global_ranks: tuple[int, ...], number: int | str, *, kind: str = "") -> Store:
    """Return the members' store under a prefix that belongs to one call of one group alone.

    Args:
        store: The members' store.
        global_ranks: The members.
        number: How many calls they have made before.
        kind: Of what the number counts, where that is not calls.

    Ranks: local; the same prefix on every member.
    """
    members = hashlib.sha256(repr(global_ranks).encode()).hexdigest()[:12]
    prefixed: Any = vars(dist)["PrefixStore"]
    return cast(Store, prefixed(f"safeload/{members}/{kind}{number}", store))


def own_line(store: Store) -> Store:
    """Return a store of the same content with a connection of its own, where the store can do that.

    A store's client serves one question at a time: a thread that waits in it would keep another from answering.
    """
    clone = getattr(store, "clone", None)
    try:
        return cast(Store, clone()) if clone is not None else store
    except (RuntimeError, NotImplementedError):
        return store


def control_store(group: ProcessGroup, *, timeout: timedelta) -> Store:
    """Return the store that the members of `group` share.

    Args:
        group: The process group.
        timeout: For making a store where the group's own can not be had.

    Returns:
        The group's own store, or one made for it, which lives as long as the group.

    Ranks: called on every rank of `group`, in the same order.
    """
    store = private_store(group)
    if store is not None:
        return store
    if group not in _own_stores:
        _own_stores[group] = own_store(group, timeout=timeout)
    return cast(Store, _own_stores[group])


def private_store(group: ProcessGroup) -> Store | None:
    """Return the group's own store through torch's private accessor; None where that has moved."""
    accessor = getattr(dist.distributed_c10d, "_get_process_group_store", None)
    try:
        store: Store | None = accessor(group) if accessor is not None else None
    except (AttributeError, KeyError, TypeError, IndexError):
        return None
    return store if hasattr(store, "compare_set") else None


def own_store(group: ProcessGroup, *, timeout: timedelta) -> Store:
    """Make a store for `group` by public means: its first rank serves, the address is broadcast.

    Args:
        group: The process group.
        timeout: For connecting.

    Returns:
        A TCPStore.

    Ranks: called on every rank of `group`, in the same order.
    """
    tcp_store: Any = vars(dist)["TCPStore"]
    serves = dist.get_rank(group) == 0
    store: Any = None
    address = torch.zeros(_ADDRESS_BYTES, dtype=torch.uint8)
    if serves:
        host = _own_address()
        store = tcp_store(host, 0, None, True, timeout, wait_for_workers=False)
        text = f"{host} {store.port}".encode()
        address[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    if "cpu" not in device_types(group):
        address = address.to(device_types(group)[0])
    dist.broadcast(address, src=dist.get_global_rank(group, 0), group=group)
    if not serves:
        host, port = bytes(address.cpu().tolist()).rstrip(b"\0").decode().split()
        store = tcp_store(host, int(port), None, False, timeout, wait_for_workers=False)
    return cast(Store, store)


def _own_address() -> str:
    """Return this host's address on the road to the job's master; loopback for a job on one host."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        family, kind, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # a datagram socket: nothing is sent, the kernel picks the road
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostbyname(socket.gethostname())


def device_types(group: ProcessGroup) -> tuple[str, ...]:
    """Return the types of device whose tensors `group` can broadcast, the cpu first.

    Args:
        group: The process group.
    """
    # "cpu:gloo,cuda:nccl"; a group made for one backend lists that backend for each device type it serves.
    pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
    found = {pair[0] for pair in pairs if len(pair) == 2 and pair[1] not in ("", "undefined")}  # noqa: PLR2004
    return tuple(sorted(found, key=lambda name: (name != "cpu", name)))
