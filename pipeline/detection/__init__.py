"""Images with boxes, for the training of detectors such as Mask R-CNN.

    pipe = ps.Pipeline.from_dataset(coco).shuffle(seed=0)  # (image, target)
    pipe = pipe.map(ps.detection.resize(800, max_size=1333)).map(ps.detection.flip())
    pipe = pipe.batch(4, collate_fn=ps.detection.collate(size_divisor=32))

A sample is `(image, target)`, or a dict with an "image", and the target a dict that has
`boxes`, `labels`, `masks`, `keypoints`, by the names that torchvision's models take
them by. All operators of `ps.image` move these with the pixels; here are those that
detectors alone need.
"""

from __future__ import annotations

from .collating import collate
from .grouping import aspect_groups
from .operators import crop, flip, resize

__all__ = ["aspect_groups", "collate", "crop", "flip", "resize"]
