"""Frozen towers on every rank: read once, verified, sent to all, and untouched by FSDP.

    self.vision_tower = safe_from_pretrained(CLIPVisionModel, path)

in place of `CLIPVisionModel.from_pretrained(path)`, also inside an outer model's `__init__`.
"""

from typing import TYPE_CHECKING

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
    "TowerCheck",
    "UnsafeFormatError",
    "UnverifiedError",
    "UnverifiedWarning",
    "check_precision",
    "check_towers",
    "frozen_towers",
    "gradient_report",
    "ignored_modules",
    "ignored_modules_pattern",
    "ignored_parameters",
    "load_report",
    "redirect_from_pretrained",
    "restore_towers",
    "safe_from_pretrained",
    "unfreeze",
    "upcast_trainable",
    "verify_checkpoint",
    "write_lock",
]

if TYPE_CHECKING:
    from safeload.auditing import verify_checkpoint, write_lock
    from safeload.checking import TowerCheck, check_towers, restore_towers
    from safeload.gradients import GradientReport, gradient_report
    from safeload.ignoring import ignored_modules, ignored_modules_pattern, ignored_parameters
    from safeload.loading import load_report, safe_from_pretrained
    from safeload.precision import PrecisionWarning, check_precision
    from safeload.protecting import frozen_towers, unfreeze
    from safeload.redirecting import redirect_from_pretrained
    from safeload.reporting import LoadReport, RankReport
    from safeload.ruling import PrecisionReport
    from safeload.upcasting import upcast_trainable
    from safeload.verifying import UnverifiedWarning
else:
    # Looked up when first used, so that `safeload --help` need not import torch; type checkers see the lines above.
    _HOMES = {
        "GradientReport": "gradients",
        "LoadReport": "reporting",
        "PrecisionReport": "ruling",
        "PrecisionWarning": "precision",
        "RankReport": "reporting",
        "TowerCheck": "checking",
        "UnverifiedWarning": "verifying",
        "check_precision": "precision",
        "check_towers": "checking",
        "frozen_towers": "protecting",
        "gradient_report": "gradients",
        "ignored_modules": "ignoring",
        "ignored_modules_pattern": "ignoring",
        "ignored_parameters": "ignoring",
        "load_report": "loading",
        "redirect_from_pretrained": "redirecting",
        "restore_towers": "checking",
        "safe_from_pretrained": "loading",
        "unfreeze": "protecting",
        "upcast_trainable": "upcasting",
        "verify_checkpoint": "auditing",
        "write_lock": "auditing",
    }

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
