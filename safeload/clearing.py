"""What a call leaves in the store: nothing. Which keys there are, and who deletes them when.

    id/<rank> beat/<rank>         who is there                 until the last rank has left
    s/<stage>/<rank>              a rank's statement           until the judge has gathered the stage
    go/<stage>/<count>            into the next collectives    until the judge has gathered the stage
    v/<stage>                     the verdict                  until all ranks have come to the end of a later stage
    flag                          some rank failed             until the last rank has left
    bye all-bye gone              the way out                  until the last rank has left

A verdict of failure waits for ranks that are late: they read it, raise it, and the last of them clears up.
"""

from __future__ import annotations

from safeload.statements import Failure
from safeload.wiring import Store

__all__ = ["go", "say_goodbye", "sweep"]


def sweep(store: Store, *, size: int, first: int, last: int, go_count: int) -> None:
    """Delete the keys of these stages, but for the last one's verdict, which not every rank may have read."""
    for index in range(first, last + 1):
        for rank in range(size):
            store.delete_key(f"s/{index}/{rank}")
        for count in range(go_count):
            store.delete_key(f"go/{index}/{count}")
        if index < last:
            store.delete_key(f"v/{index}")


def say_goodbye(store: Store, *, size: int, failure: Failure) -> None:
    """Say that this rank has read the verdict; the last of those that are here says so for all."""
    here = size - len(failure.get("lost", ())) - len(failure.get("absent", ()))
    if store.add("bye", 1) >= here:
        store.set("all-bye", "1")


def go(store: Store, *, size: int, failure: Failure, stages: tuple[int, int], go_count: int) -> None:
    """Leave; the last rank that can be expected, late ones included, deletes everything."""
    first, last = stages
    for count in range(go_count + 1):
        store.delete_key(f"go/{last}/{count}")
    if store.add("gone", 1) < size - len(failure.get("lost", ())):
        return
    sweep(store, size=size, first=first, last=last, go_count=go_count)
    people = [f"{kind}/{rank}" for kind in ("id", "beat") for rank in range(size)]
    for key in [*people, f"v/{last}", "bye", "all-bye", "gone", "flag"]:
        store.delete_key(key)
