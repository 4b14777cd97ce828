"""One drawn photo, as a file and as pixels."""

from __future__ import annotations

import io

import numpy as np
import PIL.Image
import pytest

from penstock.pipeline.image.geometry import Image
from penstock.pipeline.testing import draw_photos


@pytest.fixture(scope="session")
def photo_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A JPEG of 500 by 375 pixels."""
    folder = draw_photos(tmp_path_factory.mktemp("photo"), 1, classes=1)
    return (folder / "class_0" / "img_0001.jpg").read_bytes()


@pytest.fixture(scope="session")
def photo(photo_file: bytes) -> Image:
    """Its pixels as Pillow decodes them, `uint8 [375, 500, 3]`, read-only."""
    return np.asarray(PIL.Image.open(io.BytesIO(photo_file)))
