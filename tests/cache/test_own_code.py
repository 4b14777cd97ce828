"""penstock's own operators and sources have one identity in all runs of a checkout."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.cache import fingerprint as module
from penstock.cache.fingerprint import fingerprint
from penstock.pipeline.sources.folder import Folder

OPERATORS = {
    "decode": ps.image.decode,
    "normalize": ps.image.normalize(),
    "center_crop": ps.image.center_crop(8),
    "resize": ps.image.resize(8),
    "decode_random_resized_crop": ps.image.decode_random_resized_crop(8),
    "mask_tokens": ps.text.mask_tokens(9, 1),
}


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_a_cache_after_an_operator_of_ours_is_found_again(
    operator: Any, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.jpg").write_bytes(b"1")
    folder = Folder.scan(tmp_path)
    fingerprints = [fingerprint(folder, [("map", operator)]) for _ in range(2)]
    assert fingerprints[0].private_because is None
    assert fingerprints[0].key(0, None) == fingerprints[1].key(0, None)


def test_every_file_of_ours_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(module.__file__).parents[1]
    for name in ("cache", "pipeline/image"):
        shutil.copytree(root / name, tmp_path / name)
    (tmp_path / "pipeline" / "__init__.py").touch()
    monkeypatch.setattr(module, "__file__", str(tmp_path / "cache" / "key.py"))

    def seen() -> str | None:
        for path in tmp_path.rglob("*"):
            # Long before this process began.
            os.utime(path, (1e9, 1e9), follow_symlinks=False)
        return module.own_release.__wrapped__()

    before = {seen(), seen()}
    for name in ("cache/new.py", "pipeline/image/_photos.so", "top.py"):
        (tmp_path / name).write_bytes(b"1")
        before.add(seen())
        (tmp_path / name).write_bytes(b"2")
        before.add(seen())
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.py").touch()
    (tmp_path / "cache" / ".#new.py").symlink_to("nobody@nowhere")
    assert {seen()} <= before
    assert len(before) == 7
    assert None not in before
    for version in (f"torch {torch.__version__}", module.PYTHON):
        assert version.split()[-1] in str(seen())
    (tmp_path / "top.py").touch()  # changed since this process began
    assert module.own_release.__wrapped__() is None
