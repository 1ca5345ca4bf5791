"""What ranks tell each other: a payload, or a failure as plain fields; and which failure counts when several fail.

Pure data work: no store, no group.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

from safeload.errors import MismatchedCallError, PeerError, SafeLoadError, from_fields
from safeload.staging import stage_of
from safeload.watching import Identity

__all__ = [
    "Failure",
    "choose",
    "compare",
    "describe_failure",
    "failure_bytes",
    "is_failure",
    "pack",
    "payload_bytes",
    "payload_of",
    "peers_failed",
    "rebuild",
    "unpack",
]

_PAYLOAD: Final = b"+"
_FAILURE: Final = b"-"
_SHOWN_RANKS: Final = 16  # of each side, in a message for a job of hundreds
_BY_RANK: Final = ("failures", "calls")  # data fields that are keyed by rank; JSON knows only text keys

Failure = dict[str, Any]
"""A failure as JSON values: `error` (fields), `foreign` (not one of ours), `stuck` (a transfer broke off), and for
verdicts `lost` and `absent` (ranks in the group)."""


def payload_bytes(payload: bytes) -> bytes:
    """Return the statement of a rank that is well."""
    return _PAYLOAD + payload


def failure_bytes(failure: Failure) -> bytes:
    """Return the statement of a rank that failed, or the verdict that the call failed."""
    return _FAILURE + json.dumps(failure).encode()


def is_failure(statement: bytes) -> bool:
    """Whether a statement tells of a failure."""
    return statement[:1] == _FAILURE


def payload_of(statement: bytes) -> bytes:
    """Return the payload of a statement of success."""
    return statement[1:]


def describe_failure(error: BaseException, *, who: Identity, stage: str, stuck: bool = False) -> Failure:
    """Turn an exception into a failure.

    Args:
        error: What was raised. One of our own keeps class and data, and gets rank, host and stage where it has none.
        who: The rank that it was raised on.
        stage: In which stage.
        stuck: It is a transfer that broke off, for which somebody else may be the reason.
    """
    if isinstance(error, SafeLoadError):
        fields = error.to_fields()
        where = {"rank": who.global_rank, "host": who.host, "stage": stage}
        fields |= {name: value for name, value in where.items() if fields[name] is None}
        return {"error": fields, "foreign": False}
    stage = stage_of(error, stage)
    text = f"{type(error).__name__}: {error}"
    message = f"stage {stage!r} failed on rank {who.global_rank} with an error that is not safeload's: {text}"
    return {"error": _peer_fields(message, {who.global_rank: text}, stage, who.host), "foreign": True, "stuck": stuck}


def choose(failures: Mapping[int, Failure], *, stage: str) -> Failure:
    """Choose the one failure that every rank raises: the lowest rank's own typed error, else all foreign ones as one.

    Args:
        failures: By rank in the group; at least one.
        stage: The stage they happened in.
    """
    typed = [failures[rank] for rank in sorted(failures) if not failures[rank]["foreign"]]
    if typed:
        return typed[0]
    by_rank: dict[int, str] = {}
    for _, failure in sorted(failures.items()):
        by_rank |= {int(rank): text for rank, text in failure["error"]["data"]["failures"].items()}
    if len(failures) == 1:
        return next(iter(failures.values()))
    texts = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(by_rank.items()))
    first = failures[min(failures)]["error"]
    message = f"stage {stage!r} failed on {len(by_rank)} ranks: {texts}"
    fields = _peer_fields(message, by_rank, stage, first["host"]) | {"rank": first["rank"]}
    return {"error": fields, "foreign": True}


def peers_failed(message: str, failures: Mapping[int, str], *, stage: str, host: str | None = None) -> Failure:
    """Make the failure that says what became of some peers (global ranks)."""
    return {"error": _peer_fields(message, failures, stage, host), "foreign": True}


def _peer_fields(message: str, failures: Mapping[int, str], stage: str, host: str | None) -> dict[str, Any]:
    rank = min(failures, default=None)
    return PeerError(message, rank=rank, host=host, stage=stage, failures=dict(failures)).to_fields()


def rebuild(failure: Failure, cause: BaseException | None = None) -> SafeLoadError:
    """Rebuild the error of a failure.

    Args:
        failure: What was agreed on.
        cause: This rank's own exception, if it had one.
    """
    fields = failure["error"]
    data = dict(fields.get("data") or {})
    for name in _BY_RANK:
        if isinstance(data.get(name), dict):
            data[name] = {int(rank): text for rank, text in data[name].items()}
    error = from_fields({**fields, "data": data})
    error.__cause__ = cause
    return error


def pack(parts: Sequence[bytes]) -> bytes:
    """Join byte strings so that `unpack` gives them back."""
    lengths = struct.pack(f"<I{len(parts)}Q", len(parts), *map(len, parts))
    return lengths + b"".join(parts)


def unpack(packed: bytes) -> tuple[bytes, ...]:
    """Take apart what `pack` joined."""
    (count,) = struct.unpack_from("<I", packed)
    lengths = struct.unpack_from(f"<{count}Q", packed, 4)
    start, parts = 4 + 8 * count, []
    for length in lengths:
        parts.append(packed[start : start + length])
        start += length
    return tuple(parts)


def compare(calls: Sequence[Mapping[str, str]], global_ranks: Sequence[int]) -> None:
    """Compare what the ranks called.

    Args:
        calls: Names and values of the arguments, by rank.
        global_ranks: The ranks, for the error.

    Raises:
        MismatchedCallError: They differ; it shows each side's differing arguments.
    """
    names = list(dict.fromkeys(name for call in calls for name in call))
    differing = [name for name in names if len({call.get(name) for call in calls}) > 1]
    if not differing:
        return
    sides: dict[str, list[int]] = {}
    for rank, call in zip(global_ranks, calls, strict=True):
        said = ", ".join(f"{name}={call[name]}" if name in call else f"no {name}" for name in differing)
        sides.setdefault(said, []).append(rank)
    shown = "; ".join(f"rank{'s' if len(ranks) > 1 else ''} {_list(ranks)}: {said}" for said, ranks in sides.items())
    raise MismatchedCallError(
        f"the ranks made different calls: {shown}. Every rank of the group must load the same towers with the same "
        "arguments in the same order",
        calls={rank: said for said, ranks in sides.items() for rank in ranks[:_SHOWN_RANKS]},
    )


def _list(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN_RANKS]))
    return shown if len(ranks) <= _SHOWN_RANKS else f"{shown} and {len(ranks) - _SHOWN_RANKS} more"
