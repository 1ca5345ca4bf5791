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
from safeload.gradients import GradientReport, gradient_report
from safeload.loading import load_report, safe_from_pretrained
from safeload.precision import PrecisionWarning, check_precision
from safeload.protecting import frozen_towers, unfreeze
from safeload.reporting import LoadReport, RankReport
from safeload.ruling import PrecisionReport
from safeload.upcasting import upcast_trainable

__all__ = [
    "CheckpointError",
    "GradientReport",
    "GroupError",
    "IntegrityError",
    "LoadReport",
    "MismatchedCallError",
    "PeerError",
    "PrecisionError",
    "PrecisionReport",
    "PrecisionWarning",
    "ProtectionError",
    "RankReport",
    "SafeLoadError",
    "SourceError",
    "TowerChangedError",
    "UnsafeFormatError",
    "UnverifiedError",
    "check_precision",
    "frozen_towers",
    "gradient_report",
    "load_report",
    "safe_from_pretrained",
    "unfreeze",
    "upcast_trainable",
]
