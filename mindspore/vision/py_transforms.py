"""The operators of MindSpore 1 that work on images of Pillow.

They are those of `vision`, but for the ones defined here. Images are of Pillow from
`Decode()` to `ToTensor()`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from . import conversion

Decode = partial(conversion.Decode, to_pil=True)
Normalize = partial(conversion.Normalize, is_hwc=False)


def __getattr__(name: str) -> Any:
    from .. import vision

    return getattr(vision, name)
