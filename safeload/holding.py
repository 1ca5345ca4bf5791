"""Memory that nobody can change once it is filled, for the bytes that were hashed.

On Linux that is a memfd, sealed by the kernel against writing, shrinking and growing, by anybody and for good. Where
there is none it is a private file, readable only, in a folder that no other user can enter; it lies in memory where the
system has a file system for that. Either way what happens to the source has no effect on it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from safeload.errors import SourceError

__all__ = ["Memory", "freeze", "has_sealed_memory", "is_frozen", "new_memory", "require_memory", "show", "write_at"]

_LINUX_SEALS: Final = 0x0001 | 0x0002 | 0x0004 | 0x0008  # F_SEAL_SEAL, _SHRINK, _GROW, _WRITE
_F_ADD_SEALS: Final = 1033
_F_GET_SEALS: Final = 1034
_RAM: Final = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory by its descriptor; `path` is set where it is a private file rather than a sealed memfd."""

    fd: int
    path: Path | None


def has_sealed_memory() -> bool:
    """Say whether this system can seal memory against change.

    Returns:
        Whether it has memfd, and shows descriptors as files.
    """
    return hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir()


def new_memory(name: str, owner: ExitStack) -> Memory:
    """Make empty memory that can be filled and then frozen.

    Args:
        name: For people who look at the process.
        owner: Releases it.

    Returns:
        The memory, open for writing.
    """
    if has_sealed_memory():
        fd = os.memfd_create(f"safeload:{name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        owner.callback(os.close, fd)
        return Memory(fd=fd, path=None)
    folder = tempfile.mkdtemp(prefix="safeload-", dir=_RAM if os.access(_RAM, os.W_OK) else None)
    owner.callback(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder, "bytes")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
    owner.callback(os.close, fd)
    return Memory(fd=fd, path=path)


def freeze(memory: Memory) -> None:
    """Let nobody write to filled memory again.

    Args:
        memory: What `new_memory` returned, filled.
    """
    if memory.path is not None:
        memory.path.chmod(0o400)
        return
    import fcntl

    fcntl.fcntl(memory.fd, _F_ADD_SEALS, _LINUX_SEALS)


def is_frozen(fd: int) -> bool:
    """Say whether memory is sealed against writing, shrinking and growing.

    Args:
        fd: Any descriptor of it, also one that came from another process.
    """
    import fcntl

    wanted = _LINUX_SEALS & ~0x0001
    try:
        return fcntl.fcntl(fd, _F_GET_SEALS) & wanted == wanted
    except OSError:  # not memory but a file on a disk
        return False


def write_at(fd: int, data: memoryview, offset: int, *, path: Path) -> None:
    """Write all of `data` at `offset` of memory.

    Args:
        fd: The memory.
        data: Contiguous bytes.
        offset: Where in it.
        path: What is copied, for messages.

    Raises:
        SourceError: There is no memory left for it.
    """
    written = 0
    try:
        while written < len(data):
            written += _write_part(fd, data[written:], offset + written)
    except OSError as error:
        raise SourceError(f"{path}: cannot be copied into memory: {error.strerror}.", path=str(path)) from error


def _write_part(fd: int, data: memoryview, offset: int) -> int:
    if hasattr(os, "pwrite"):
        return os.pwrite(fd, data, offset)
    os.lseek(fd, offset, os.SEEK_SET)  # Windows
    return os.write(fd, data)


def show(fd: int, path: Path | None, target: Path) -> None:
    """Make memory appear as a file of this process.

    Args:
        fd: Its descriptor, which must stay open meanwhile.
        path: The private file that it is, if it is one.
        target: Where it is to appear.
    """
    if path is None:
        target.symlink_to(f"/proc/self/fd/{fd}")
    else:
        target.symlink_to(path)


def require_memory(size_bytes: int, *, what: str) -> None:
    """Refuse a copy that the machine has no memory for, before it is begun.

    Args:
        size_bytes: What the copy needs.
        what: What is to be copied, for the message.

    Raises:
        SourceError: There is less memory than that.
    """
    available_bytes = _available_bytes()
    if available_bytes is not None and size_bytes > available_bytes:
        raise SourceError(
            f"{what}: {size_bytes} bytes of weights do not fit into the {available_bytes} bytes of memory that are "
            "free; memory='mapped' maps them where they are.",
            path=what,
        )


def _available_bytes() -> int | None:
    """Return what Linux says is free for new allocations; None elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
