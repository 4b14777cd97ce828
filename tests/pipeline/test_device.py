"""To the device: as bytes, normalised there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import penstock as ps

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.5)


def described() -> ps.Pipeline:
    images = torch.arange(4 * 2 * 5 * 3, dtype=torch.uint8).reshape(4, 2, 5, 3)
    return ps.Pipeline.from_dataset([(im, at) for at, im in enumerate(images)]).batch(4)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_images_become_floats_on_the_device(dtype: Any, *, channels_last: bool) -> None:
    ((raw, _),) = described()
    pipe = described().to_device(
        "cpu", normalize=(MEAN, STD), dtype=dtype, channels_last=channels_last
    )
    ((images, labels),) = pipe
    wanted = (raw / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    assert images.dtype == dtype
    assert images.shape == (4, 3, 2, 5)
    assert torch.allclose(images.float(), wanted.permute(0, 3, 1, 2), atol=0.02)
    assert labels.tolist() == [0, 1, 2, 3]
    assert labels.dtype == torch.int64
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert images.is_contiguous(memory_format=layout)
    assert "normalize=((0.4, 0.5, 0.6), (0.2, 0.25, 0.5))" in repr(pipe)


@pytest.mark.parametrize("wrong", [5, (MEAN,), (MEAN, (1, 2)), (MEAN, (0, 1, 1))])
def test_a_wrong_normalisation_is_an_error_with_an_example(wrong: Any) -> None:
    with pytest.raises(ps.SpecError, match=r"\(means, deviations\)"):
        described().to_device("cpu", normalize=wrong)


def test_nothing_to_normalise_is_an_error() -> None:
    pipe = ps.Pipeline.from_dataset(range(8)).batch(4)
    batches = iter(pipe.to_device("cpu", normalize=(MEAN, STD)))
    with pytest.raises(ps.SpecError, match=r"uint8 \[N, H, W, 3\]"):
        next(batches)
