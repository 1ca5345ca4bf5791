"""Hold digests to a manifest: every file named, every digest the same; pure but for the names of links in messages."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from safeload.digests import Digest, Manifest
from safeload.errors import IntegrityError
from safeload.indexes import listed

__all__ = ["compare", "require_covered", "require_nothing_else"]

_OWN = ("SHA256SUMS", "model.sig")  # what says what the files should be


def require_covered(manifest: Manifest, names: Iterable[str]) -> None:
    """Refuse files that a manifest does not name: a load opens nothing else.

    Args:
        manifest: One that names no file at all covers everything, as nobody vouches for anything.
        names: The files that the load needs, relative to the manifest's folder.

    Raises:
        IntegrityError: The manifest names other files but not these.
    """
    uncovered = [name for name in names if name not in manifest.entries]
    if manifest.entries and uncovered:
        raise IntegrityError(
            f"{manifest.folder}: the load needs {listed(uncovered)}, not named by {manifest.source}. Make a lock "
            "that names all files (safeload lock), or remove what does not belong there.",
            path=str(manifest.folder / uncovered[0]),
            algorithm="sha256",
            provenance=manifest.provenance,
        )


def require_nothing_else(manifest: Manifest) -> None:
    """Refuse a folder that holds files which the manifest does not name.

    Hidden folders (`.cache`, `.git`), a lock and a signature are passed over.

    Args:
        manifest: What the folder should hold.

    Raises:
        IntegrityError: All other files are listed.
    """
    there = [path.relative_to(manifest.folder) for path in manifest.folder.rglob("*") if not path.is_dir()]
    visible = [path.as_posix() for path in there if not any(part.startswith(".") for part in path.parts)]
    extra = sorted(name for name in visible if name not in manifest.entries and name not in _OWN)
    if extra:
        raise IntegrityError(
            f"{manifest.folder}: strict_folder=True, and {listed(extra)} not named by {manifest.source}. Remove what "
            "does not belong there, or make a lock that names it.",
            path=str(manifest.folder / extra[0]),
            provenance=manifest.provenance,
        )


def compare(manifest: Manifest, digests: Mapping[str, Mapping[str, str]]) -> None:
    """Refuse bytes that are not the expected ones.

    Args:
        manifest: What they should be.
        digests: By name, then by algorithm, in hexadecimal; files that the manifest does not name are passed over.

    Raises:
        IntegrityError: All files that differ are listed.
    """
    wrong = [
        name for name in digests if name in manifest.entries and not _agrees(manifest.entries[name], digests[name])
    ]
    if wrong:
        raise _differs(manifest, digests, wrong)


def _agrees(expected: Digest, actual: Mapping[str, str]) -> bool:
    return actual.get(expected.algorithm) == expected.hex


def _differs(manifest: Manifest, digests: Mapping[str, Mapping[str, str]], wrong: list[str]) -> IntegrityError:
    lines = []
    for name in wrong[:10]:
        expected = manifest.entries[name]
        actual = digests[name].get(expected.algorithm)
        path = manifest.folder / name
        lines.append(f"{path}: {expected.algorithm} is {actual}, expected {expected.hex}.{_links_of(path)}")
    bytes_at = ", ".join(str((manifest.folder / name).resolve()) for name in wrong[:10])
    again = f"Delete {bytes_at} and fetch it again"
    if manifest.repo_id:
        again += f": hf download --force-download --revision {manifest.commit} {manifest.repo_id} {' '.join(wrong)}"
    if manifest.provenance == "pinned":
        again += "; leave the pinned digests as they are, unless the files were changed on purpose"
    first = manifest.entries[wrong[0]]
    return IntegrityError(
        f"{' '.join(lines)} The expected digest is {manifest.provenance}, from {manifest.source}. {again}.",
        path=str(manifest.folder / wrong[0]),
        algorithm=first.algorithm,
        expected=first.hex,
        actual=digests[wrong[0]].get(first.algorithm),
        provenance=manifest.provenance,
    )


def _links_of(path: Path) -> str:
    """Say through which links the bytes are reached, a shared store's entry last."""
    hops: list[str] = []
    while path.is_symlink() and len(hops) < 8:  # noqa: PLR2004
        path = path.parent / os.readlink(path)
        hops.append(os.path.normpath(path))
    return f" It is a link to {', then to '.join(hops)}." if hops else ""
