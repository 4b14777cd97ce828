"""Batches on the trainer's device: copied as they are, and converted to floats there.

Images are copied as bytes, which take a quarter of the room of floats. On the device
they are normalised, cast, and turned to channels first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import SpecError, check
from ...system.printing import call
from .tensors import map_tensors

Normalize = tuple[Sequence[float], Sequence[float]]
"""Mean and standard deviation of each channel, for values from 0 to 1."""

Carry = Callable[[torch.Tensor], torch.Tensor]
"""Copies a tensor to the device."""


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
            found = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise SpecError(
                f'`device` must be one such as "cpu" or "cuda:0", got {device!r}'
                "; pass the name of a device that torch has here"
            ) from error
        check(
            found.type != "cuda" or torch.cuda.is_available(),
            f"to_device({device!r}): this machine has no CUDA device that torch can "
            'use; use to_device("cpu") or leave it out',
        )
        check(
            isinstance(dtype, torch.dtype) and dtype.is_floating_point,
            f"`dtype` must be a floating-point torch dtype, got {dtype!r}"
            "; torch.float32 is usual",
        )
        return cls(found, checked(normalize), dtype, channels_last)

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
        mean, std = (tuple(map(float, each)) for each in normalize)
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
            mean, std = (torch.tensor(each) for each in stage.normalize)
            # Cast on the host: only the copy is issued then, and it is done on return.
            self._scale = (1 / (255 * std)).to(stage.dtype).to(stage.device)
            self._shift = (-mean / std).to(stage.dtype).to(stage.device)

    def __call__(self, data: Any, carry: Carry | None = None) -> Any:
        """Return the batch on the device.

        Args:
            data: the batch.
            carry: copies a tensor there; None copies in the current stream.

        Raises:
            SpecError: images were to be normalised, but the batch has none.
        """
        found: list[bool] = []
        carry = carry or self._copied

        def move(tensor: torch.Tensor) -> torch.Tensor:
            moved = carry(tensor)
            is_image = self._is_image(tensor)
            found.append(is_image)
            return self._normalized(moved) if is_image else moved

        moved = map_tensors(data, move)
        if self._stage.normalize is not None and not any(found):
            channels = len(self._stage.normalize[0])
            raise SpecError(
                "to_device(normalize=...) found no images in the batch, uint8"
                f" [N, H, W, {channels}]; leave it out, or batch images as decoded"
            )
        return moved

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._stage.device, non_blocking=True)

    def _is_image(self, tensor: torch.Tensor) -> bool:
        """Whether it is `uint8 [N, H, W, C]`, with the channels to normalise."""
        normalize = self._stage.normalize
        if normalize is None or tensor.dtype != torch.uint8 or tensor.dim() != 4:
            return False
        return tensor.shape[-1] == len(normalize[0])

    def _normalized(self, images: torch.Tensor) -> torch.Tensor:
        """Return `[N, C, H, W]`, (x / 255 - mean) / deviation."""
        floats = images.to(self._stage.dtype).mul_(self._scale).add_(self._shift)
        permuted = floats.permute(0, 3, 1, 2)  # a view: channels last in memory
        return permuted if self._stage.channels_last else permuted.contiguous()
