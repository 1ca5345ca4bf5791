"""Let all ranks of the source's node compare the weights with their known chunks, from the beginning of the load on.

Receives on the source rank an `Opened`; the other ranks learn of the chunks, take the files and the tickets over, and
compare while the source still constructs the tower. A rank that cannot take part takes no ticket; only where the ranks
together have found every chunk to agree does that count.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from safeload.chunking import ChunkList
from safeload.errors import GroupError
from safeload.group import Group
from safeload.handing import node_key, take
from safeload.matching import Matching, chunk_count, issue_tickets
from safeload.opening import Opened, cores_here
from safeload.sharing import offer

__all__ = ["Split", "split_chunks"]


@dataclass(slots=True, kw_only=True)
class Split:
    """What this rank has of the common work: `total` chunks. `fds` are the files and, last, the tickets."""

    total: int
    known: tuple[ChunkList, ...]
    fds: tuple[int, ...]
    threads: int
    kept: ExitStack
    matching: Matching | None = None

    def begin(self) -> None:
        """Begin to compare, where this rank can."""
        if self.matching is None and self.fds and self.known:
            self.matching = Matching(self.fds[:-1], self.known, self.fds[-1], threads=self.threads)
            self.kept.callback(self.matching.close)

    def agrees(self, ranks: Group) -> bool:
        """Wait until all is compared.

        Args:
            ranks: All of them.

        Returns:
            Whether every chunk was compared by some rank, and agrees; the same on every rank.

        Ranks: every rank, in the same order.
        """
        mine = ranks.agree("chunks", lambda: self.matching.result(check=ranks.check) if self.matching else 0)
        counts = [json.loads(raw) for raw in ranks.gather_bytes("chunks", json.dumps(mine).encode())]
        return None not in counts and sum(counts) == self.total


def split_chunks(ranks: Group, opened: Opened | None, kept: ExitStack) -> Split | None:
    """Tell the other ranks of the chunks, and let those of this node begin to compare.

    Args:
        ranks: All of them.
        opened: On the source rank, where the files may be shared; None elsewhere.
        kept: Ends with the load.

    Returns:
        This rank's share; None, on every rank, where nothing is known.

    Ranks: every rank, in the same order. The source begins only when it says `begin`.
    """
    own = Split(total=0, known=(), fds=(), threads=1, kept=kept)
    letter: dict[str, Any] = {}
    if opened is not None and opened.known:
        tickets = issue_tickets(chunk_count(opened.known), kept)
        own.known, own.fds = opened.known, (*opened.filling.memory_fds, tickets)
        node, address = offer(opened.filling.memory_fds, kept, also=(tickets,))
        letter = {"node": node, "address": address, "total": chunk_count(opened.known)}
        letter["known"] = [chunks.to_fields() for chunks in opened.known]
    letter = json.loads(ranks.send_bytes("chunks", json.dumps(letter).encode()))
    if not letter:
        return None
    own.total = letter["total"]
    mates = next(len(host) for host in ranks.hosts if ranks.rank in host)
    own.threads = max(1, cores_here() // mates)
    if not ranks.is_source:
        _take_part(own, letter)
    return own


def _take_part(own: Split, letter: dict[str, Any]) -> None:
    known = [ChunkList.from_fields(fields) for fields in letter["known"]]
    if letter["node"] != node_key() or None in known:  # elsewhere, or without the library that computes these digests
        return
    try:
        own.fds = tuple(take(letter["address"], len(known) + 1))
    except GroupError:
        return
    own.known = tuple(chunks for chunks in known if chunks is not None)
    for fd in own.fds:
        own.kept.callback(os.close, fd)
    own.begin()
