"""Batches on the trainer's device: copied as they are, made floats there.

Images cross as the bytes they are, a quarter of what floats take; on the device they
are normalised, cast, and turned to channels first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import SpecError, check
from ...system.printing import call
from .stamp import map_tensors

Normalize = tuple[Sequence[float], Sequence[float]]
"""Mean and standard deviation of each channel, of values from 0 to 1."""

Carry = Callable[[torch.Tensor], torch.Tensor]
"""Brings a tensor to the device."""


@dataclass(frozen=True, slots=True, repr=False)
class DeviceStage:
    """Batches copied to a device, and images normalised there."""

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
        """Check that there is such a device, and what is to be done there."""
        try:
            found = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise SpecError(
                f'`device` must be one like "cpu" or "cuda:0", got {device!r}'
            ) from error
        check(
            found.type != "cuda" or torch.cuda.is_available(),
            f"to_device({device!r}): this machine has no CUDA device that torch can "
            'use; use to_device("cpu") or leave it out',
        )
        check(
            isinstance(dtype, torch.dtype) and dtype.is_floating_point,
            f"`dtype` must be a torch dtype of floats, got {dtype!r}",
        )
        return cls(found, checked(normalize), dtype, channels_last)

    def __repr__(self) -> str:
        return call(".to_device", self, str(self.device))


def checked(
    normalize: Normalize | None,
) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Return mean and deviation as tuples, or raise `SpecError`."""
    if normalize is None:
        return None
    try:
        mean, std = (tuple(map(float, each)) for each in normalize)
    except (TypeError, ValueError):
        mean, std = (), ()
    check(
        mean and len(mean) == len(std) and all(value > 0 for value in std),
        "`normalize` must be (means, deviations), one of each a channel, deviations"
        f" > 0: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), got {normalize!r}",
    )
    return mean, std


class ToDevice:
    """Does it, batch by batch: in the trainer's thread, in the current stream."""

    def __init__(self, stage: DeviceStage) -> None:
        self._stage = stage
        self._scale = self._shift = torch.empty(0)
        if stage.normalize is not None and stage.device.type != "meta":
            mean, std = (torch.tensor(each) for each in stage.normalize)
            # Cast first: then the copy is all there is, and done when it returns.
            self._scale = (1 / (255 * std)).to(stage.dtype).to(stage.device)
            self._shift = (-mean / std).to(stage.dtype).to(stage.device)

    def __call__(self, data: Any, carry: Carry | None = None) -> Any:
        """Return the batch on the device.

        Args:
            data: the batch.
            carry: how a tensor gets there; None: copied in the current stream.

        Raises:
            SpecError: images were to be normalised, and there are none in it.
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
        """Whether it is `uint8 [N, H, W, C]`, with the channels to be normalised."""
        normalize = self._stage.normalize
        if normalize is None or tensor.dtype != torch.uint8 or tensor.dim() != 4:
            return False
        return tensor.shape[-1] == len(normalize[0])

    def _normalized(self, images: torch.Tensor) -> torch.Tensor:
        """Return `[N, C, H, W]`, (x / 255 - mean) / deviation."""
        floats = images.to(self._stage.dtype).mul_(self._scale).add_(self._shift)
        permuted = floats.permute(0, 3, 1, 2)  # as it is: channels last in memory
        return permuted if self._stage.channels_last else permuted.contiguous()
