"""What a rank knows of one load on its way: the call, what the source tells of it, the module before and after.

Records only, each made by one stage and read by the next.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from safeload.group import Group
from safeload.planning import LoadPlan
from safeload.reporting import StageClock
from safeload.requesting import Request
from safeload.sharing import Blocks, Choice, Layout
from safeload.sourcing import Sourced
from safeload.summing import Summing

__all__ = ["Call", "Filled", "Letter", "Prepared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """What the source tells the other ranks before the payload: JSON only. `layout` is what it offers to share."""

    load_plan: LoadPlan
    layout: Layout | None
    uses_chunks: bool = False

    def to_json(self) -> bytes:
        """Return the record as JSON bytes."""
        layout = None if self.layout is None else self.layout.to_fields()
        plan = self.load_plan.to_json().decode()
        return json.dumps({"plan": plan, "layout": layout, "uses_chunks": self.uses_chunks}).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Letter:
        """Read what `to_json` wrote on the source rank."""
        fields = json.loads(raw)
        return cls(
            load_plan=LoadPlan.from_json(fields["plan"]),
            layout=None if fields["layout"] is None else Layout.from_fields(fields["layout"]),
            uses_chunks=fields["uses_chunks"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of `safe_from_pretrained` on this rank; what is entered into `kept` ends with it."""

    request: Request
    ranks: Group
    clock: StageClock
    kept: ExitStack

    @property
    def shares(self) -> bool:
        """Whether ranks of one node may be given the same memory."""
        return self.ranks.size > 1 and self.request.transport != "broadcast"


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """A rank's module, its tensors in place.

    `blocks` is the memory behind them where it can be mapped again; `summing` fingerprints them where it cannot.
    """

    module: nn.Module
    load_plan: LoadPlan
    choice: Choice
    blocks: Blocks | None
    uses_chunks: bool = False
    summing: Summing | None = None

    @property
    def is_mapped(self) -> bool:
        """Whether every rank has its tower before the bytes are there; the same on every rank."""
        return self.choice.transport != "broadcast"

    def check_sealed(self) -> None:
        """Make sure, after the verdict, that memory which should be sealed is; see `Blocks.check_sealed`."""
        if self.blocks is not None:
            self.blocks.check_sealed()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a rank has before it knows the plan: the module, the device that it will live on, and on the source more."""

    module: nn.Module
    device: torch.device
    sourced: Sourced | None
