"""Which of some files does this process open? Watched from inside, by three roads.

1. Python's audit event "open": `open`, `os.open`, `pathlib`, whatever ends there.
2. `safetensors.safe_open`, whose own open is Rust's and raises no audit event; every name that is bound to it.
3. `/proc/self/maps` at the end, where there is one: files that are mapped by then, whoever has opened them.

Files are told by what they are (device and inode), not by what they are called, so that links and copies of the path do
not hide an open, and a link to other bytes does not count as one. What opens a file by another road, and neither maps
it nor keeps it mapped, is not seen.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

__all__ = ["OpenedFiles", "observe_opens"]

_MAPS: Final = Path("/proc/self/maps")
_MAPS_FIELDS: Final = 6  # address, permissions, offset, device, inode, path

_active: list[OpenedFiles] = []
_hooked: list[bool] = []

Identity = tuple[int, int]  # device, inode


class OpenedFiles:
    """The watched files that this process has opened.

    Args:
        paths: What to watch.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._names = {_identity(path): path.name for path in paths}
        self._opened: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the files that were opened, sorted."""
        return tuple(sorted(self._opened))

    def note(self, path: object) -> None:
        """Note that `path` is being opened, if it is one of the watched files."""
        if isinstance(path, str | bytes | os.PathLike):
            with contextlib.suppress(OSError, ValueError):
                name = self._names.get(_identity(path))
                self._opened.update([] if name is None else [name])

    def note_mapped(self) -> None:
        """Note the watched files that are mapped now."""
        if not _MAPS.exists():
            return
        for line in _MAPS.read_text(errors="replace").splitlines():
            fields = line.split(maxsplit=_MAPS_FIELDS - 1)
            if len(fields) == _MAPS_FIELDS:  # by the path: the device told here is not what stat tells on every system
                self.note(fields[-1])


@contextlib.contextmanager
def observe_opens(paths: Iterable[Path]) -> Iterator[OpenedFiles]:
    """Watch which of these files this process opens inside the block.

    Args:
        paths: Files that exist.

    Yields:
        The record, filled while the block runs and completed at its end.
    """
    opened = OpenedFiles(paths)
    _hook_python()
    _active.append(opened)
    try:
        with _safe_open_watched(opened):
            yield opened
    finally:
        _active.remove(opened)
        opened.note_mapped()


def _identity(path: Any) -> Identity:
    info = os.stat(path)
    return info.st_dev, info.st_ino


def _hook_python() -> None:
    """Add the audit hook, once: it cannot be taken away."""
    if not _hooked:
        _hooked.append(True)
        sys.addaudithook(_on_event)


def _on_event(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and _active:
        for opened in tuple(_active):
            opened.note(args[0])


@contextlib.contextmanager
def _safe_open_watched(opened: OpenedFiles) -> Iterator[None]:
    import safetensors

    original: Any = safetensors.safe_open
    watched = _watching(original, opened)
    spaces: list[dict[str, Any]] = [getattr(module, "__dict__", {}) for module in tuple(sys.modules.values())]
    owners = [names for names in spaces if names.get("safe_open") is original]
    for names in owners:
        names["safe_open"] = watched
    try:
        yield
    finally:
        for names in owners:
            names["safe_open"] = original


def _watching(safe_open: Callable[..., Any], opened: OpenedFiles) -> Callable[..., Any]:
    def watched(filename: Any, *args: Any, **kwargs: Any) -> Any:
        opened.note(filename)
        return safe_open(filename, *args, **kwargs)

    return watched
