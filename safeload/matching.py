"""Compare files with the known digests of their chunks, by as many threads of a node's ranks as have time for it.

Receives open files, the digests of their chunks (`chunking`), and tickets: a pipe that holds one ticket for each few
chunks. Whoever is idle takes the next ticket, in whatever process it lives: a rank that has a tower to construct takes
fewer than one that waits. Gives how many chunks this process has found to agree; only together do the counts say that
every chunk was compared, so that a ticket that was lost with its taker is noticed.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack

from safeload.chunking import ChunkList, chunk_agrees, new_buffer
from safeload.waiting import Check, Workers, wait_for

__all__ = ["Matching", "all_agree", "chunk_count", "issue_tickets"]

_TICKET = struct.Struct("<I")  # the number of its first chunk, counted through all files
_MOST_TICKETS = 1000  # less than a page: what a pipe always holds


def chunk_count(known: Sequence[ChunkList]) -> int:
    """Return how many chunks some files have, all together."""
    return sum(len(chunks.digests) for chunks in known)


def _chunks_per_ticket(count: int) -> int:
    return max(1, -(-count // _MOST_TICKETS))


def issue_tickets(count: int, kept: ExitStack) -> int:
    """Make the tickets for so many chunks.

    Args:
        count: From `chunk_count`.
        kept: Closes the descriptor.

    Returns:
        A descriptor to read tickets from; it can be handed to other processes.
    """
    tickets, giver = os.pipe()
    kept.callback(os.close, tickets)
    try:
        os.write(giver, b"".join(_TICKET.pack(first) for first in range(0, count, _chunks_per_ticket(count))))
    finally:
        os.close(giver)  # who finds none left reads the end of the file
    return tickets


class Matching:
    """This process's share in comparing files with the digests of their chunks; runs in threads of its own.

    Args:
        fds: The files; duplicated, since a thread that is stuck in a read outlives the load.
        known: The digests, in the same order.
        tickets: From `issue_tickets`.
        threads: How many to use.
    """

    def __init__(self, fds: Sequence[int], known: Sequence[ChunkList], tickets: int, *, threads: int) -> None:
        self._known = tuple(known)
        self._used = ExitStack()
        self._fds = tuple(map(self._own, fds))
        self._tickets = self._own(tickets)
        self._stopped = False
        self._workers = Workers(threads, name="safeload-chunk")
        self._futures: list[Future[int | None]] = [self._workers.submit(self._work) for _ in range(threads)]

    def _own(self, fd: int) -> int:
        own = os.dup(fd)
        self._used.callback(os.close, own)
        return own

    def result(self, *, check: Check) -> int | None:
        """Wait until no ticket is left.

        Args:
            check: Asked now and then; what it raises ends the wait.

        Returns:
            How many chunks were compared here and agree; None where one does not, or cannot be read.
        """
        counts = [
            wait_for(future, check=check, doing=lambda: "the weight files are compared by their chunks")
            for future in self._futures
        ]
        return None if None in counts else sum(count for count in counts if count is not None)

    def close(self) -> None:
        """Take no more tickets; what a stuck thread uses stays open until it comes back."""
        self._stopped = True
        self._workers.close(patience_s=0.0)
        self._workers.when_ended(self._used.close)

    def _work(self) -> int | None:
        agreed, buffer = 0, new_buffer()
        total = chunk_count(self._known)
        while not self._stopped and (ticket := os.read(self._tickets, _TICKET.size)):
            (first,) = _TICKET.unpack(ticket)
            for number in range(first, min(first + _chunks_per_ticket(total), total)):
                if self._stopped or not self._agrees(number, buffer):
                    self._stopped = True
                    return None
                agreed += 1
        return agreed

    def _agrees(self, number: int, buffer: memoryview) -> bool:
        for fd, chunks in zip(self._fds, self._known, strict=True):
            if number < len(chunks.digests):
                try:
                    return chunk_agrees(fd, chunks, number, buffer=buffer)
                except OSError:  # told by the pass over the whole file, which follows
                    return False
            number -= len(chunks.digests)
        raise AssertionError("a ticket for a chunk that there is not")


def all_agree(fds: Sequence[int], known: Sequence[ChunkList], *, threads: int, check: Check) -> bool:
    """Compare all chunks of some files in this process alone.

    Args:
        fds: The files.
        known: Their digests.
        threads: How many to use.
        check: Asked now and then; what it raises ends the wait.
    """
    with ExitStack() as kept:
        matching = Matching(fds, known, issue_tickets(chunk_count(known), kept), threads=threads)
        kept.callback(matching.close)
        return matching.result(check=check) == chunk_count(known)
