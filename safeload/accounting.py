"""What a load did, on every rank, as one report: each rank's own account, gathered."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, Final

import torch

from safeload.calling import Call, Filled
from safeload.metering import MemoryMeter
from safeload.reporting import LoadReport, RankReport
from safeload.sourcing import Sourced

__all__ = ["gather_report", "own_account"]

_CPU: Final = torch.device("cpu")
_PENDING: Final = {"verdict": "pending", "digest": "", "provenance": "", "provenance_detail": "", "files": {}}


def own_account(call: Call, meter: MemoryMeter, filled: Filled, sourced: Sourced | None) -> RankReport:
    """Return what this rank did.

    Args:
        call: The call.
        meter: Where it has been stopped, its last reading is the memory at the end.
        filled: This rank's tower.
        sourced: On the source rank.

    Ranks: local.
    """
    size_bytes = filled.load_plan.size_bytes
    return RankReport(
        rank=call.ranks.global_rank,
        host=call.ranks.host,
        read_bytes=sourced.seen.bytes_read if sourced else 0,
        files_opened=sourced.seen.names if sourced else (),
        sent_bytes=size_bytes if sourced and call.ranks.size > 1 else 0,
        received_bytes=0 if sourced else size_bytes,
        memory_before_bytes=meter.before_bytes,
        memory_peak_bytes=meter.peak_bytes,
        memory_after_bytes=meter.after_bytes,
        device=str(next((parameter.device for parameter in filled.module.parameters()), _CPU)),
    )


def gather_report(call: Call, filled: Filled, own: RankReport, sourced: Sourced | None) -> LoadReport:
    """Gather what every rank did, and what the source knows of the checkpoint.

    Args:
        call: The call.
        filled: This rank's tower.
        own: From `own_account`.
        sourced: On the source rank.

    Returns:
        The report, the same on every rank but for the seconds, which are this rank's own. Where the verdict is still
        out it says so.

    Ranks: every rank, in the same order.
    """
    ranks = call.ranks
    facts: dict[str, Any] | None = None
    if sourced is not None:
        facts = sourced.facts() | (sourced.verified_facts() if call.request.verdict == "load" else _PENDING)
    said = {"facts": facts, "rank": own.to_json().decode()}
    gathered = [json.loads(raw) for raw in ranks.gather_bytes("report", json.dumps(said).encode())]
    reports = tuple(RankReport.from_json(each["rank"]) for each in gathered)
    specs = [spec for spec in filled.load_plan.tensors if spec.same_as is None]
    return LoadReport(
        origin=call.request.origin,
        source_rank=reports[ranks.source_rank].rank,
        world_size=ranks.size,
        transport=filled.choice.transport,
        transport_reason=filled.choice.reason,
        tensors=len(specs),
        tower_bytes=filled.load_plan.size_bytes,
        dtypes=dict(Counter(spec.dtype for spec in specs)),  # asdict does not copy a Counter rightly
        seconds=dict(call.clock.seconds),
        ranks=reports,
        **gathered[ranks.source_rank]["facts"],
    )
