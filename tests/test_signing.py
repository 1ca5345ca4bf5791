"""A checkpoint pinned by a signature of OpenSSF model signing: by key and by certificate, offline."""

import datetime
import json

import pytest

from safeload.auditing import verify_checkpoint
from safeload.cli import main
from safeload.errors import CheckpointError, IntegrityError, SafeLoadError, SourceError
from safeload.signing import SignedManifest
from tests.files import clip_sharded, clip_single, flip, write


def model_signing():
    return pytest.importorskip("model_signing", reason="model-signing is not installed: it comes with the extra 'sign'")


def write_key(path):
    """Write a new private key and its public key."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    path.with_suffix(".pub").write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return key


def write_certificate(path, name, key, *, issuer, issuer_key, is_authority):
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    now = datetime.datetime.now(datetime.timezone.utc)
    subject, signer = (x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)]) for text in (name, issuer))
    usage = dict.fromkeys(
        [
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ],
        False,
    )
    usage |= {"digital_signature": True, "key_cert_sign": is_authority, "crl_sign": is_authority}
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(signer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(**usage), critical=True)
        .add_extension(x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
        .sign(issuer_key, hashes.SHA256())
    )
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return path


@pytest.fixture(params=["key", "certificate"])
def signed(request, tmp_path):
    """A folder, and what pins it."""
    signing = model_signing().signing
    folder = write(tmp_path / "tower", clip_sharded())
    key, signature = write_key(tmp_path / "key.pem"), tmp_path / "model.sig"
    config = signing.Config()
    if request.param == "key":
        config.use_elliptic_key_signer(private_key=tmp_path / "key.pem").sign(folder, signature)
        return folder, SignedManifest(path=signature, public_key=tmp_path / "key.pub")
    root = write_key(tmp_path / "root.pem")
    whole = write_certificate(tmp_path / "root.crt", "root", root, issuer="root", issuer_key=root, is_authority=True)
    leaf = write_certificate(tmp_path / "leaf.crt", "leaf", key, issuer="root", issuer_key=root, is_authority=False)
    config.use_certificate_signer(
        private_key=tmp_path / "key.pem", signing_certificate=leaf, certificate_chain=[whole]
    ).sign(folder, signature)
    return folder, SignedManifest(path=signature, certificate_chain=(whole,))


def test_signed_files(signed):
    folder, manifest = signed
    found = verify_checkpoint(folder, manifest=manifest)
    assert (found.provenance, found.source) == ("pinned", str(manifest.path))
    assert sorted(found.checked) == sorted(clip_sharded())


def test_changed_file(signed):
    folder, manifest = signed
    path = next(folder.glob("*.safetensors"))
    path.write_bytes(flip(path.read_bytes()))
    with pytest.raises(IntegrityError) as caught:
        verify_checkpoint(folder, manifest=manifest)
    assert caught.value.path == str(path)


def test_changed_signature(signed):
    folder, manifest = signed
    bundle = json.loads(manifest.path.read_text())
    bundle["dsseEnvelope"]["payload"] = bundle["dsseEnvelope"]["payload"].replace("A", "B", 3)
    manifest.path.write_text(json.dumps(bundle))
    with pytest.raises((IntegrityError, CheckpointError)):
        verify_checkpoint(folder, manifest=manifest)


def test_signature_of_somebody_else(signed, tmp_path):
    folder, manifest = signed
    other = write_key(tmp_path / "other.pem")
    if manifest.public_key:
        stranger = SignedManifest(path=manifest.path, public_key=tmp_path / "other.pub")
    else:
        root = tmp_path / "other.crt"
        write_certificate(root, "root", other, issuer="root", issuer_key=other, is_authority=True)
        stranger = SignedManifest(path=manifest.path, certificate_chain=(root,))
    with pytest.raises(IntegrityError, match="not signed by"):
        verify_checkpoint(folder, manifest=stranger)


def test_missing_and_malformed(signed, tmp_path):
    folder, manifest = signed
    (folder / "config.json").unlink()
    with pytest.raises(SourceError, match=r"config\.json"):
        verify_checkpoint(folder, manifest=manifest)
    for junk in (b"", b"{}", b"[]", b"\xff"):
        manifest.path.write_bytes(junk)
        with pytest.raises((CheckpointError, IntegrityError)):
            verify_checkpoint(folder, manifest=manifest)
    manifest.path.unlink()
    with pytest.raises(SourceError, match=r"model\.sig"):
        verify_checkpoint(folder, manifest=manifest)


def test_command(signed, capsys):
    folder, manifest = signed
    signer = ["--public-key", str(manifest.public_key)]
    if manifest.certificate_chain:
        signer = ["--certificate-chain", *map(str, manifest.certificate_chain)]
    assert main(["verify", str(folder), "--signature", str(manifest.path), *signer]) == 0
    assert "pinned" in capsys.readouterr().out
    assert main(["verify", str(folder), "--signature", str(manifest.path)]) == 2
    assert main(["verify", str(folder), *signer]) == 2
    assert main(["verify", str(folder), "--signature", "x", "--manifest", "y", *signer]) == 2


def test_who_signed_must_be_said(tmp_path):
    with pytest.raises(SafeLoadError, match="who signed"):
        verify_checkpoint(write(tmp_path, clip_single()), manifest=SignedManifest(path="model.sig"))
