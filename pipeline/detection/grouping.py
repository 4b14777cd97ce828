"""Groups of images with about the same aspect, so that batches need little padding."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import check


def aspect_groups(sizes: Any, groups: int = 7) -> NDArray[np.int64]:
    """Return the group of each image by its aspect, `int64 [N]`, 0 to `groups` - 1.

    Pass it to `.batch(n, lengths=...)`. Images of a group then share batches, except
    where one group ends and the next begins. The borders between groups are evenly
    spaced on a logarithmic scale from 1:2 to 2:1, as in torchvision's reference scripts
    for detection.

    Args:
        sizes: height and width of each image in pixels, `[N, 2]`.
        groups: number of groups. An even number separates portrait from landscape.

    Raises:
        SpecError: `sizes` does not have this shape, or `groups` is below 1.
    """
    given = np.asarray(sizes, np.float64)
    check(
        given.ndim == 2 and given.shape[1] == 2 and (given > 0).all(),
        "`sizes` must be height and width of each image, [N, 2] and > 0, got"
        f" {[*given.shape]}; take them from the dataset's index or the files' headers",
    )
    check(groups >= 1, f"`groups` must be >= 1, got {groups}; 7 is usual")
    # A single border belongs at 1:1; linspace would put it at the lower end.
    borders = np.ones(1) if groups == 2 else 2 ** np.linspace(-1, 1, groups - 1)
    found: NDArray[np.int64] = np.searchsorted(
        borders, given[:, 1] / given[:, 0], side="right"
    ).astype(np.int64)
    return found
