"""Fingerprint a rank's tensors while their bytes arrive, on a thread that has nothing else to do.

Receives the plan and the memory that the broadcast fills; is told of each segment that is complete. Gives the
fingerprints by name that the protection of the tower begins with: it need not read the whole tower again then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future

import torch

from safeload.fingerprinting import fingerprint
from safeload.placing import tensors_of
from safeload.planning import LoadPlan, TensorSpec
from safeload.waiting import Check, Workers, wait_for

__all__ = ["Summing"]


class Summing:
    """Fingerprints of tensors whose bytes arrive one segment after another; a context manager.

    Args:
        load_plan: The source's plan.
        segments: One uint8 tensor `[size_bytes]` per segment, being filled.
        device: Where the segments are.
    """

    def __init__(self, load_plan: LoadPlan, segments: tuple[torch.Tensor, ...], *, device: torch.device) -> None:
        self._tensors = tensors_of(load_plan, segments, device=device)
        self._specs: dict[int, list[TensorSpec]] = defaultdict(list)
        for spec in load_plan.tensors:
            if spec.segment >= 0 and spec.same_as is None:
                self._specs[spec.segment].append(spec)
        self._workers = Workers(1, name="safeload-sum")
        self._found: dict[str, Future[str]] = {}

    def add(self, segment: int) -> None:
        """Take a segment whose bytes are all there.

        Args:
            segment: Its number.
        """
        for spec in self._specs[segment]:
            self._found[spec.name] = self._workers.submit(fingerprint, self._tensors[spec.name])

    def result(self, *, check: Check) -> Mapping[str, str]:
        """Wait until all that was added is done.

        Args:
            check: Asked now and then; what it raises ends the wait.

        Returns:
            The fingerprints by the name of the tensor.
        """
        doing = "the tensors are fingerprinted"
        return {name: wait_for(future, check=check, doing=lambda: doing) for name, future in self._found.items()}

    def __enter__(self) -> Summing:
        """Return itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """End the thread."""
        self._workers.close()
        self._tensors = {}
