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

if TYPE_CHECKING:
    from safeload.loading import load_report, safe_from_pretrained
    from safeload.protecting import frozen_towers, unfreeze
    from safeload.reporting import LoadReport, RankReport
else:
    # Looked up when first used, so that `safeload --help` need not import torch; type checkers see the lines above.
    _HOMES = {
        "LoadReport": "reporting",
        "RankReport": "reporting",
        "frozen_towers": "protecting",
        "load_report": "loading",
        "safe_from_pretrained": "loading",
        "unfreeze": "protecting",
    }

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
