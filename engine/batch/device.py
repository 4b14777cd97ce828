"""Finished batches: split by rows, or copied to the trainer's device.

Images are copied as bytes, which take a quarter of the room of floats. On the device
they are normalised, cast, and turned to channels first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import SpecError, check
from ...system.printing import call

# Mean and standard deviation of each channel, for values from 0 to 1.
Normalize = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True, slots=True, repr=False)
class DeviceStage:
    """Batches copied to a device, with images normalised there."""

    device: torch.device
    normalize: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    dtype: torch.dtype = torch.float32
    channels_last: bool = False

    @classmethod
    def of(
        cls,
        device: str | torch.device,
        normalize: Normalize | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        channels_last: bool = False,
    ) -> DeviceStage:
        """Check that there is such a device, and the work to do there.

        Raises:
            SpecError: there is no such device, or an argument is invalid.
        """
        try:
            place = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise SpecError(
                f'`device` must be one such as "cpu" or "cuda:0", got {device!r}'
                "; pass the name of a device that torch has here"
            ) from error
        check(
            place.type != "cuda" or torch.cuda.is_available(),
            f"to_device({device!r}): this machine has no CUDA device that torch can "
            'use; use to_device("cpu") or leave it out',
        )
        check(
            isinstance(dtype, torch.dtype) and dtype.is_floating_point,
            f"`dtype` must be a floating-point torch dtype, got {dtype!r}"
            "; torch.float32 is usual",
        )
        return cls(place, checked(normalize), dtype, channels_last)

    def __repr__(self) -> str:
        return call(".to_device", self, str(self.device))


def checked(
    normalize: Normalize | None,
) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Return mean and deviation as tuples.

    Raises:
        SpecError: they are not one of each per channel, with deviations > 0.
    """
    if normalize is None:
        return None
    try:
        mean, std = (tuple(map(float, values)) for values in normalize)
    except (TypeError, ValueError):
        mean, std = (), ()
    check(
        mean and len(mean) == len(std) and all(value > 0 for value in std),
        "`normalize` must be (means, deviations), one of each per channel, deviations"
        f" > 0: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), got {normalize!r}"
        "; give both in the order of the channels",
    )
    return mean, std


class ToDevice:
    """Applies a `DeviceStage` to batches, in the trainer's thread and its stream."""

    def __init__(self, stage: DeviceStage) -> None:
        self._stage = stage
        self._scale = self._shift = torch.empty(0)
        if stage.normalize is not None and stage.device.type != "meta":
            mean, std = (torch.tensor(v, dtype=torch.float32) for v in stage.normalize)
            # Cast on the host: only the copy is issued then, and it is done on return.
            self._scale = (1 / (255 * std)).to(stage.dtype).to(stage.device)
            self._shift = (-mean / std).to(stage.dtype).to(stage.device)

    def __call__(
        self, data: Any, carry: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> Any:
        """Return the batch on the device.

        Args:
            data: the batch.
            carry: copies a tensor there; None copies in the current stream.

        Raises:
            SpecError: images were to be normalised, but the batch has none.
        """
        stage, any_images = self._stage, False
        # A host that does not wait would read memory before a copy has reached it.
        under_way = stage.device.type == "cuda"
        channels = len(stage.normalize[0]) if stage.normalize else 0

        def move(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal any_images
            moved_tensor = (
                carry(tensor)
                if carry
                else tensor.to(stage.device, non_blocking=under_way)
            )
            # `uint8 [N, H, W, C]`, with the channels to normalise
            is_image = (
                channels > 0
                and tensor.dtype == torch.uint8
                and tensor.dim() == 4
                and tensor.shape[-1] == channels
            )
            any_images = any_images or is_image
            return self._normalized(moved_tensor) if is_image else moved_tensor

        batch = map_tensors(data, move)
        if channels and not any_images:
            raise SpecError(
                "to_device(normalize=...) found no images in the batch, uint8"
                f" [N, H, W, {channels}]; leave it out, or batch images as decoded"
            )
        return batch

    def _normalized(self, images: torch.Tensor) -> torch.Tensor:
        """Return `[N, C, H, W]`, (x / 255 - mean) / deviation."""
        floats = images.to(self._stage.dtype).mul_(self._scale).add_(self._shift)
        view = floats.permute(0, 3, 1, 2)  # channels last in memory
        return view if self._stage.channels_last else view.contiguous()


def in_parts(data: Any, count: int) -> list[Any]:
    """Return a batch as a list of `count` batches of equally many rows: views.

    Raises:
        SpecError: something in it is not a tensor.
    """

    def part(at: int) -> Any:
        return map_tensors(data, lambda tensor: tensor.chunk(count)[at], refuse)

    return [part(at) for at in range(count)]


def refuse(leaf: Any) -> Any:
    """Refuse a leaf that cannot be split by rows.

    Raises:
        SpecError: always.
    """
    raise SpecError(
        f"microbatches are made of tensors, but this batch has a {type(leaf).__name__};"
        " leave it out in a map(), or in a function given to batch(collate_fn=...)"
    )


def map_tensors(
    data: Any,
    change: Callable[[torch.Tensor], torch.Tensor],
    other: Callable[[Any], Any] = lambda leaf: leaf,
) -> Any:
    """Return `data` with each tensor in its lists, tuples and dicts changed.

    Other leaves go through `other`.
    """
    if isinstance(data, torch.Tensor):
        return change(data)
    if isinstance(data, dict):
        mapping = copy.copy(data)  # keeps its type, as default_collate does
        mapping.update({k: map_tensors(v, change, other) for k, v in data.items()})
        return mapping
    if isinstance(data, list):
        items = copy.copy(data)  # keeps what else a list of the user's own holds
        items[:] = [map_tensors(value, change, other) for value in data]
        return items
    if isinstance(data, tuple):
        values = [map_tensors(value, change, other) for value in data]
        return type(data)(*values) if hasattr(data, "_fields") else type(data)(values)
    return other(data)
