"""Image operators for `Pipeline.map`: decode, crop, flip, and these fused into one.

    pipe.map(ps.image.decode).map(ps.image.random_resized_crop(224))
    pipe.map(ps.image.decode_random_resized_crop(224, flip=0.5))

Both lines decode only the crop of a JPEG, with an extension in C that is built with
penstock if libjpeg-turbo's headers are installed. `decode`, an operator that crops or
resizes, and a flip or a central crop after it become one stage, with the same results.
The second line also decodes photos that are much larger than the crop at a smaller
scale.

    pipe.map(ps.image.decode_only_random_resized_crop(224, flip=0.5))

This one does not read the file below the crop, so damage there may go unnoticed.

    pipe.map(ps.image.random_resized_crop(224)).map(ps.image.rand_augment())
    pipe.batch(32).map(ps.image.mixup(1000)).map(ps.image.normalize())

An operator takes the bytes of a file, an array `uint8 [H, W, 3]`, a tensor `uint8 [3,
H, W]` or a Pillow image: alone, as the first element of a tuple, or as a dict's
"image". Boxes, masks and keypoints in a dict move with the image if they have the names
that torchvision's detection models use. Everything else is passed on.

All operators may run on any number of threads at once, and the result does not depend
on that number. Cropping, resizing and mirroring release the GIL.
"""

from .codec import decode
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
from .values import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    color_jitter,
    cutmix,
    mixup,
    normalize,
    rand_augment,
)

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
