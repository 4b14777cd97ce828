"""Image operators for `Pipeline.map`: decode, crop, flip, and these fused into one.

    pipe.map(ps.image.decode).map(ps.image.random_resized_crop(224))
    pipe.map(ps.image.decode_random_resized_crop(224, flip=0.5))

The second decodes only the crop of a JPEG, by an extension in C that is built with
penstock where libjpeg-turbo's headers are, and it decodes less where photos are large
for the crops.

    pipe.map(ps.image.decode_only_random_resized_crop(224, flip=0.5))

The third leaves unread what is below the crop: damage there may go unnoticed.

    pipe.map(ps.image.random_resized_crop(224)).map(ps.image.rand_augment())
    pipe.batch(32).map(ps.image.mixup(1000)).map(ps.image.normalize())

An operator takes the bytes of a file, an array `uint8 [H, W, 3]`, a tensor `uint8 [3,
H, W]` or a Pillow image: alone, as the first element of a tuple, or as a dict's
"image". Boxes, masks and keypoints in a dict move with it, by the names that
torchvision's detection models have for them; all else is handed on.

All may run on any number of threads at once, and the bytes do not depend on the number
of threads. What cuts, resizes and mirrors does so outside the GIL.
"""

from __future__ import annotations

from .codec import decode
from .color import color_jitter
from .mixing import cutmix, mixup
from .normalizing import IMAGENET_MEAN, IMAGENET_STD, normalize
from .operators import (
    center_crop,
    decode_only_random_resized_crop,
    decode_random_resized_crop,
    horizontal_flip,
    pad,
    random_crop,
    random_resized_crop,
    resize,
    resize_short_side,
)
from .rand_augment import rand_augment

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "center_crop",
    "color_jitter",
    "cutmix",
    "decode",
    "decode_only_random_resized_crop",
    "decode_random_resized_crop",
    "horizontal_flip",
    "mixup",
    "normalize",
    "pad",
    "rand_augment",
    "random_crop",
    "random_resized_crop",
    "resize",
    "resize_short_side",
]
