"""Image operators for `Pipeline.map`: decode, crop, flip, and these fused into one.

    pipe.map(ps.image.decode).map(ps.image.random_resized_crop(224))
    pipe.map(ps.image.decode_random_resized_crop(224, flip=0.5))

The second decodes only the crop of a JPEG, by an extension in C that is built with
penstock where libjpeg-turbo's headers are, and it decodes less where photos are large
for the crops.

    pipe.map(ps.image.decode_only_random_resized_crop(224, flip=0.5))

The third leaves unread what is below the crop: damage there may go unnoticed.

Every operator works on a bare image or on the first element of a tuple, whose other
elements it hands on unchanged. All may run on any number of threads at once: the work
is done outside the GIL, and the bytes do not depend on the number of threads.
"""

from __future__ import annotations

from .codec import decode
from .operators import (
    center_crop,
    decode_only_random_resized_crop,
    decode_random_resized_crop,
    horizontal_flip,
    random_resized_crop,
    resize_short_side,
)

__all__ = [
    "center_crop",
    "decode",
    "decode_only_random_resized_crop",
    "decode_random_resized_crop",
    "horizontal_flip",
    "random_resized_crop",
    "resize_short_side",
]
