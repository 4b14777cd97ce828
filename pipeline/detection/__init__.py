"""Images with boxes, for the training of detectors such as Mask R-CNN.

    pipe = ps.Pipeline.from_dataset(coco).shuffle(seed=0)  # (image, target)
    pipe = pipe.map(ps.detection.resize(800, max_size=1333)).map(ps.detection.flip())
    pipe = pipe.batch(4, collate_fn=ps.detection.collate(size_divisor=32))

A sample is `(image, target)`, or a dict with an "image". The target is a dict with
`boxes`, `labels`, `masks` and `keypoints`, named as for torchvision's models. All
operators of `ps.image` move these along with the pixels. This module adds the operators
that only detectors need.
"""

from __future__ import annotations

from .collating import collate
from .grouping import aspect_groups
from .operators import crop, flip, resize

__all__ = ["aspect_groups", "collate", "crop", "flip", "resize"]
