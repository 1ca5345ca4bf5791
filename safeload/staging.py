"""Name the stage in which something went wrong, where several stages run as one step of the group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from safeload.errors import SafeLoadError

__all__ = ["stage", "stage_of"]

_STAGE: Final = "_safeload_stage"


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Put a stage's name on what is raised inside, unless a stage within has done so.

    Args:
        name: As in `SafeLoadError.stage`.
    """
    try:
        yield
    except SafeLoadError as error:
        error.stage = error.stage or name
        raise
    except Exception as error:
        with contextlib.suppress(AttributeError):
            if not hasattr(error, _STAGE):
                setattr(error, _STAGE, name)
        raise


def stage_of(error: BaseException, default: str) -> str:
    """Return the stage that `stage` put on a foreign exception.

    Args:
        error: Any exception that is not of safeload's own.
        default: Where none was put on it.
    """
    return str(getattr(error, _STAGE, default))
