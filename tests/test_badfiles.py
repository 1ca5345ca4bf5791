"""Every row of the table of bad checkpoints, against the source's own stages."""

import re
import time
import warnings

import pytest

from safeload.errors import SafeLoadError
from safeload.examining import examine
from safeload.resolving import resolve
from safeload.sealing import seal
from safeload.verifying import UnverifiedWarning, expect, verify
from tests.badfiles import ROWS, make
from tests.files import clip_sharded, clip_single

LIMIT_S = 5


def run_source(folder, *, manifest=None, **where):
    """All of the source's stages up to the build; returns the bytes that the loader would get."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnverifiedWarning)
        checkpoint = resolve(folder, **where)
        expected = expect(checkpoint, manifest=manifest)
        with seal(checkpoint, expected) as sealed:
            verify(expected, sealed.digests)
            examine(sealed)
            return {name: sealed.read(name) for name in sealed.names}


def payloads(files):
    """The data of all weight files, without their headers."""
    weights = [data for name, data in files.items() if name.endswith(".safetensors")]
    return sorted(data[8 + int.from_bytes(data[:8], "little") :] for data in weights)


def test_names_of_rows_are_unique():
    names = [row.name for row in ROWS]
    assert len(names) == len(set(names))


@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize("row", [row for row in ROWS if row.stage == "source"], ids=lambda row: row.name)
def test_bad_checkpoint(row, tmp_path):
    folder = make(row, tmp_path / "tower")
    start = time.monotonic()
    if row.error is None:
        read = run_source(folder)
        good = clip_single() if row.layout == "single" else clip_sharded()
        assert payloads(read) == payloads(good)
    else:
        with pytest.raises(row.error) as caught:
            run_source(folder)
        assert isinstance(caught.value, SafeLoadError)
        assert re.search(row.match, caught.value.message, re.DOTALL), caught.value.message
        assert len(caught.value.message) < 3000
    assert time.monotonic() - start < LIMIT_S


def test_folder_whose_name_is_not_text(tmp_path):
    from tests.files import write

    folder = tmp_path / b"tower-\xff".decode("utf-8", "surrogateescape")
    folder.mkdir()
    write(folder, clip_single())
    assert run_source(folder)["config.json"] == clip_single()["config.json"]
