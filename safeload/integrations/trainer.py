"""The HF Trainer: master weights in float32, and a check before the first step.

trainer = Trainer(model, args, ..., callbacks=[PrecisionCallback()])
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from safeload.precision import check_precision
from safeload.upcasting import upcast_trainable

__all__ = ["PrecisionCallback"]


class PrecisionCallback(TrainerCallback):  # type: ignore[misc] # the library has no types
    """Cast what trains to float32 before the optimizer is built, and check every train() before its first step.

    The check comes after the model was wrapped and a checkpoint resumed, so that what a resume or a late adapter
    brought back in half precision is mended, or named, before it can fail.
    """

    def __init__(self, *, upcast: bool = True) -> None:
        """Choose between mending and only checking.

        Args:
            upcast: Cast with `upcast_trainable`. False: `check_precision` raises what it finds.
        """
        self.upcast = upcast

    def on_init_end(self, args: Any, state: Any, control: Any, *, model: Any = None, **kwargs: Any) -> None:
        """Cast before the optimizer is built and the model is wrapped; with `model_init` there is none yet."""
        if self.upcast and model is not None and not _engine_trains(args):
            upcast_trainable(model)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Cast once more, and check."""
        if self.upcast and not _engine_trains(args):
            upcast_trainable(model, optimizer=optimizer)
        check_precision(model, args, optimizer=optimizer)


def _engine_trains(args: Any) -> bool:
    """Whether DeepSpeed trains: it keeps master weights of its own, and its half-precision ones are to stay."""
    return bool(getattr(args, "deepspeed", None))
