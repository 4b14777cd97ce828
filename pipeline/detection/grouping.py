"""Images of about the same aspect come together, so that little is padded."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import check


def aspect_groups(sizes: Any, groups: int = 7) -> NDArray[np.int64]:
    """Return the number of each image's group of aspects, `int64 [N]`, 0 to `groups`-1.

    Give it to `.batch(n, lengths=...)`: images of one group then come together, but for
    the batches where one group ends. The borders are spread evenly on a scale of
    logarithms from 1:2 to 2:1, as those of torchvision's reference for detection are.

    Args:
        sizes: height and width of each image in pixels, `[N, 2]`.
        groups: an even number keeps upright and lying images apart.

    Raises:
        SpecError: no sizes, or no group.
    """
    given = np.asarray(sizes, np.float64)
    check(
        given.ndim == 2 and given.shape[1] == 2 and (given > 0).all(),
        "`sizes` must be height and width of each image, [N, 2] and > 0, got"
        f" {[*given.shape]}; a dataset's index tells them, or the files' headers",
    )
    check(groups >= 1, f"`groups` must be >= 1, got {groups}; 7 is usual")
    # A single border is 1:1: linspace would have it at its lower end.
    borders = np.ones(1) if groups == 2 else 2 ** np.linspace(-1, 1, groups - 1)
    found: NDArray[np.int64] = np.searchsorted(
        borders, given[:, 1] / given[:, 0], side="right"
    ).astype(np.int64)
    return found
