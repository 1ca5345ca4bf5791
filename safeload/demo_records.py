"""What the demo has seen, rank by rank, and what of it must hold for the demo to pass."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

__all__ = ["WAYS", "DemoResult", "LoadRow", "Setting", "TrainRow"]

WAYS: Final = ("Model(config)", "Model.from_pretrained")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the ranks work with.

    Attributes:
        tower: Folder of the tower.
        origin: What the user asked for; the folder where nothing was asked for.
        tower_class: Name of the class in transformers.
        width: Size of its features.
        outer: Folder of a checkpoint of the outer model, without the tower.
        weight_files: Paths of the tower's weight files.
        tower_bytes: Bytes of all its tensors.
        reference: sha256 of every parameter and buffer, by name, as one process alone loads them.
        buffers: Which of these are buffers.
        versions: Of the stack.
    """

    tower: str
    origin: str
    tower_class: str
    width: int
    outer: str
    weight_files: tuple[str, ...]
    tower_bytes: int
    reference: dict[str, str]
    buffers: tuple[str, ...]
    versions: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRow:
    """What one way to make the model gave on one rank.

    Attributes:
        rank: Which.
        way: How the outer model was made, one of `WAYS`.
        tensors: Parameters and buffers of the tower, as one process alone loads them.
        wrong_parameters: Names of those that differ from these, in any bit.
        wrong_buffers: Names of those.
        example: The first values of the first wrong tensor.
        opened: Weight files of the tower that this process was seen to open.
        error: Class and first line of what was raised.
        before_bytes: Memory (PSS) before the load; None where it is unknown, and with plain `from_pretrained`.
        peak_bytes: Highest while it ran.
        after_bytes: After it.
    """

    rank: int
    way: str
    tensors: int
    wrong_parameters: tuple[str, ...] = ()
    wrong_buffers: tuple[str, ...] = ()
    example: str | None = None
    opened: tuple[str, ...] = ()
    error: str | None = None
    before_bytes: int | None = None
    peak_bytes: int | None = None
    after_bytes: int | None = None

    @property
    def right(self) -> bool:
        """Whether every tensor is what one process alone loads."""
        return self.error is None and not self.wrong_parameters and not self.wrong_buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRow:
    """What training left of the tower, on one rank.

    Attributes:
        rank: Which.
        way: How the outer model was made.
        losses: One a step, of this rank's own batch.
        features: sha256 of the tower's output for the same images on every rank.
        same_memory: Whether every tensor of the tower still has the address it had after the load.
        same_objects: Whether every Parameter is still the same object.
        same_values: Whether every tensor still has the same bytes.
        sharded: Trainable parameters that FSDP has sharded.
        trainable: Trainable parameters.
        changed: Of these, how many have changed.
        memory_bytes: Memory (PSS) after the last step; None where it is unknown.
    """

    rank: int
    way: str
    losses: tuple[float, ...]
    features: str
    same_memory: bool
    same_objects: bool
    same_values: bool
    sharded: int
    trainable: int
    changed: int
    memory_bytes: int | None

    @property
    def untouched(self) -> bool:
        """Whether nothing has happened to the tower."""
        return self.same_memory and self.same_objects and self.same_values


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """All of it.

    Attributes:
        setting: What was loaded.
        ranks: Number of processes.
        plain: With plain `from_pretrained`: a row a way and rank.
        safe: The same with safeload.
        trained: What training left, in the same order as `safe`.
        report: Rank 0's report of the first of these loads, as plain values.
    """

    setting: Setting
    ranks: int
    plain: tuple[LoadRow, ...]
    safe: tuple[LoadRow, ...]
    trained: tuple[TrainRow, ...]
    report: dict[str, Any]

    @property
    def failed(self) -> tuple[str, ...]:
        """What safeload promises and did not hold; empty where the demo passed."""
        source = self.report["source_rank"]
        checks = {
            "every tensor of the tower is right, on every rank": all(row.right for row in self.safe),
            "only the source rank opens a weight file": all(
                bool(row.opened) == (row.rank == source) for row in self.safe
            ),
            "the same images have the same features on every rank": len({row.features for row in self.trained}) == 1,
            "the tower is untouched after the last step": all(row.untouched for row in self.trained),
            "the trainable part is sharded": all(0 < row.sharded == row.trainable for row in self.trained),
            "the trainable part has changed": all(row.changed == row.trainable for row in self.trained),
        }
        return tuple(name for name, held in checks.items() if not held)

    @property
    def passed(self) -> bool:
        """Whether everything held that safeload promises. What plain `from_pretrained` gave does not matter."""
        return not self.failed

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, for JSON."""
        return {**asdict(self), "failed": self.failed, "passed": self.passed}
