"""MindSpore's operators for images.

    import penstock.mindspore.vision as vision    # was: mindspore.dataset.vision

    data = data.map([vision.Decode(), vision.Resize(256)], "image")

Each is also a function: `vision.Resize(32)(image)`. They take arrays `[H, W, C]` or
images of Pillow, with the results that MindSpore has for each, but for rounding. The
older modules `vision.c_transforms` and `vision.py_transforms` are here, too.
"""

from __future__ import annotations

import sys
from typing import Any

from . import py_transforms, utils
from .colors import (
    AutoContrast,
    CutOut,
    Equalize,
    Invert,
    RandomColor,
    RandomColorAdjust,
    RandomErasing,
    RandomGrayscale,
    RandomPosterize,
    RandomSelectSubpolicy,
    RandomSharpness,
    RandomSolarize,
)
from .conversion import (
    HWC2CHW,
    Decode,
    Normalize,
    Rescale,
    ToPIL,
    ToTensor,
)
from .geometry import (
    CenterCrop,
    Crop,
    Pad,
    RandomAffine,
    RandomCrop,
    RandomCropDecodeResize,
    RandomHorizontalFlip,
    RandomResize,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    Resize,
)
from .utils import Border, Inter

__all__ = [
    "HWC2CHW",
    "AutoContrast",
    "Border",
    "CenterCrop",
    "Crop",
    "CutOut",
    "Decode",
    "Equalize",
    "Inter",
    "Invert",
    "Normalize",
    "Pad",
    "RandomAffine",
    "RandomColor",
    "RandomColorAdjust",
    "RandomCrop",
    "RandomCropDecodeResize",
    "RandomErasing",
    "RandomGrayscale",
    "RandomHorizontalFlip",
    "RandomPosterize",
    "RandomResize",
    "RandomResizedCrop",
    "RandomRotation",
    "RandomSelectSubpolicy",
    "RandomSharpness",
    "RandomSolarize",
    "RandomVerticalFlip",
    "Rescale",
    "Resize",
    "ToPIL",
    "ToTensor",
    "py_transforms",
    "utils",
]


# Operators that MindSpore computes in Python.
PYTHONS = (RandomErasing, RandomGrayscale, ToPIL)

c_transforms = transforms = sys.modules[__name__]
for _name in ("c_transforms", "transforms"):
    sys.modules[f"{__name__}.{_name}"] = transforms


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"penstock.mindspore.vision has no {name!r}; write a function of the array, and"
        " give it to map(), or use penstock.image"
    )
