"""Frozen towers on every rank: read once, verified, broadcast, and untouched by FSDP."""

from safeload.errors import (
    CheckpointError,
    GroupError,
    IntegrityError,
    MismatchedCallError,
    PeerError,
    PrecisionError,
    ProtectionError,
    SafeLoadError,
    SourceError,
    TowerChangedError,
    UnsafeFormatError,
    UnverifiedError,
)
from safeload.loading import load_report, safe_from_pretrained
from safeload.protecting import frozen_towers, unfreeze
from safeload.reporting import LoadReport, RankReport

__all__ = [
    "CheckpointError",
    "GroupError",
    "IntegrityError",
    "LoadReport",
    "MismatchedCallError",
    "PeerError",
    "PrecisionError",
    "ProtectionError",
    "RankReport",
    "SafeLoadError",
    "SourceError",
    "TowerChangedError",
    "UnsafeFormatError",
    "UnverifiedError",
    "frozen_towers",
    "load_report",
    "safe_from_pretrained",
    "unfreeze",
]
