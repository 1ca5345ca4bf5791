"""OpenSSF model signing: digests that somebody signed, `model.sig`, offline, by a key or a certificate.

Receives a `SignedManifest` and gives a `Lock`: the signature vouches for the digests, and the load holds the bytes it
reads to them, so that nothing is read twice. Needs `pip install safeload[sign]`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safeload.digests import Digest
from safeload.errors import CheckpointError, IntegrityError, SafeLoadError, SourceError
from safeload.indexes import is_plain_name
from safeload.locking import Lock
from safeload.reading import open_regular

__all__ = ["SignedManifest", "read_signed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedManifest:
    """A signature to pin a checkpoint by; pass it as `manifest=`.

    `path` is that of `model.sig`. Exactly one of `public_key` (PEM, of an elliptic curve) and `certificate_chain` (PEM,
    the authorities that are trusted) says whose signature it must be.
    """

    path: str | os.PathLike[str]
    public_key: str | os.PathLike[str] | None = None
    certificate_chain: tuple[str | os.PathLike[str], ...] = ()


def read_signed(manifest: SignedManifest) -> Lock:
    """Verify a signature and read the digests that were signed.

    Args:
        manifest: The signature, and who must have made it.

    Returns:
        The digests, as a lock.

    Raises:
        SourceError: The extra is not installed, or a file is not there.
        IntegrityError: The signature is not of that key or certificate, or was changed.
        CheckpointError: Malformed, or signed in a way that has no sha256 for each file.

    Ranks:
        Source rank only.
    """
    if (manifest.public_key is None) == (not manifest.certificate_chain):
        raise SafeLoadError("SignedManifest: expected one of public_key and certificate_chain, as who signed matters.")
    path = Path(manifest.path)
    for needed in (path, manifest.public_key, *manifest.certificate_chain):
        if needed is not None:
            os.close(open_regular(Path(needed), name=Path(needed).name).fd)
    signed = _verify_signature(manifest, path)
    if signed.serialization_type.get("method") != "files":
        raise CheckpointError(
            f"{path}: signed with {signed.serialization_type}; expected one digest a file, model_signing's default.",
            path=str(path),
        )
    return Lock(path=str(path), entries=MappingProxyType(_digests(signed.resource_descriptors(), path)))


def _verify_signature(manifest: SignedManifest, path: Path) -> Any:
    """Return what was signed. The one place that reaches below model_signing's public names.

    Its public `verify` reads the whole folder itself, so that what it read and what is loaded could differ.
    """
    try:
        from model_signing import verifying
        from model_signing._signing import sign_sigstore_pb
    except ImportError as error:
        raise SourceError(f"{path}: pip install safeload[sign] to verify it ({error}).", path=str(path)) from error
    config = verifying.Config()
    try:
        signature = sign_sigstore_pb.Signature.read(path)
    except Exception as error:  # whatever a malformed bundle makes its JSON and protobuf readers raise
        raise CheckpointError(f"{path}: not a signature bundle: {error}.", path=str(path)) from error
    try:
        if manifest.public_key is not None:
            config.use_elliptic_key_verifier(public_key=manifest.public_key)
        else:
            config.use_certificate_verifier(certificate_chain=manifest.certificate_chain)
        return config._verifier.verify(signature)
    except Exception as error:  # ValueError and InvalidSignature alike, and what the readers of keys raise
        signer = manifest.public_key or ", ".join(map(str, manifest.certificate_chain))
        raise IntegrityError(
            f"{path}: not signed by {signer}, or changed since ({type(error).__name__}: {error}).",
            path=str(path),
            algorithm="signature",
            expected=str(signer),
            provenance="pinned",
        ) from error


def _digests(descriptors: Iterable[Any], path: Path) -> dict[str, Digest]:
    digests: dict[str, Digest] = {}
    for descriptor in descriptors:
        name, algorithm = descriptor.identifier, descriptor.digest.algorithm
        if not is_plain_name(name) or name in digests or algorithm != "sha256":
            raise CheckpointError(
                f"{path}: {name!r:.300} with {algorithm}: expected sha256 by plain names.", path=str(path)
            )
        digests[name] = Digest(algorithm="sha256", hex=descriptor.digest.digest_hex.lower())
    if not digests:
        raise CheckpointError(f"{path}: names no file.", path=str(path))
    return digests
