"""The operators that cut, resize and mirror; users pass them to `map`.

Each takes an image, or a sample that holds one (`SampleParts`), and moves boxes, masks
and keypoints along with it.

Each is a frozen value that compares, pickles and prints as the call that makes it, also
in the log. That is why the classes have lower-case names: they are used like functions,
as `functools.partial` is.
"""
# ruff: noqa: N801

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, SupportsIndex

import numpy as np

from ...engine.plan import Context
from ...errors import SpecError, check, whole_number
from .codec import (
    CropDecoder,
    decode,
    is_bomb,
    like,
    on_pixels,
    pixels_of,
    shaped,
    size_of,
)
from .geometry import (
    Box,
    Encoded,
    Fill,
    Image,
    Placement,
    Range,
    SampleParts,
    as_given,
    box_at_random,
    central_box,
    moved_annotations,
    numbers,
    random_box,
    require_encoded,
    short_side_size,
    typed,
)

DECODER = CropDecoder()
USUAL_SIZE = "224 pixels are usual"


def placed_sample(
    sample: Any,
    choose: Callable[[int, int], Placement],
    *,
    per_box: Sequence[str] = (),
    by_middle: bool = False,
    mask_fill: int = 0,
    to_end: bool = True,
) -> Any:
    """Return a sample with its image and its annotations placed.

    Args:
        sample: an image, or a sample that holds one: see `SampleParts`.
        choose: returns the placement for an image of this height and width.
        per_box: see `moved_annotations`.
        by_middle: see `moved_annotations`.
        mask_fill: see `moved_annotations`.
        to_end: see `CropDecoder.crops`.

    Raises:
        SampleError: it has no image, or its annotations have wrong shapes.
        ValueError: it has the bytes of a file that cannot be decoded.
    """
    parts = SampleParts.of(sample)
    height, width = size_of(parts.image)
    placement = choose(height, width)
    if isinstance(parts.image, Encoded):
        pixels = DECODER.crop(parts.image, placement, to_end=to_end)
        image = on_canvas(pixels, placement)
    else:
        image = like(parts.image, drawn_image(pixels_of(parts.image), placement))
    if parts.target is None:
        return parts.with_image(image)
    target = moved_annotations(
        parts.target,
        placement,
        (height, width),
        per_box=per_box,
        by_middle=by_middle,
        mask_fill=mask_fill,
    )
    return parts.with_image(image, target)


def drawn_image(image: Image, placement: Placement) -> Image:
    """Return the new image, `uint8 [H, W, 3]`, in new memory."""
    part = placement.box.cut(image) if placement.cuts else image
    pixels = on_canvas(shaped(part, placement), placement)
    # The batch must not keep a whole photo alive for a part of it.
    return pixels.copy() if np.may_share_memory(pixels, image) else pixels


def on_canvas(image: Image, placement: Placement) -> Image:
    """Return an image with what goes around it; itself if that is nothing."""
    canvas = placement.canvas
    if canvas is None:
        return image
    around = np.full((canvas.height, canvas.width, 3), placement.fill, np.uint8)
    replace(canvas, height=placement.height, width=placement.width).cut(around)[:] = (
        image
    )
    return around


def on_files(
    samples: Sequence[Any],
    choices: Iterator[Callable[[int, int], Placement]],
    *,
    to_end: bool,
) -> list[Any]:
    """Return samples with their images placed, made in one call without the GIL.

    None stands for a sample that must be made by itself: its image is no file, or one
    that the extension refuses, or it has annotations.

    Args:
        samples: what an operator takes.
        choices: for each, what returns the placement for a height and a width. One is
            asked before the next is taken.
        to_end: see `CropDecoder.crops`.
    """
    results: list[Any] = [None] * len(samples)
    parts = [SampleParts.of(sample) for sample in samples]
    # Empty for what is no file, or has annotations: the extension refuses it.
    files = [
        part.image if part.target is None and isinstance(part.image, Encoded) else b""
        for part in parts
    ]
    sizes = zip(DECODER.sizes(files), choices, strict=True)
    placements = {
        at: choose(height, width)
        for at, ((height, width), choose) in enumerate(sizes)
        if height and not is_bomb(height, width)
    }
    images = DECODER.crops(
        [files[at] for at in placements], [*placements.values()], to_end=to_end
    )
    for (at, placement), image in zip(placements.items(), images, strict=True):
        if image is not None:
            results[at] = parts[at].with_image(on_canvas(image, placement))
    return results


class Placing(ABC):
    """An operator that only says where an image goes: several go there in one call."""

    __slots__ = ()
    TO_END: ClassVar[bool] = True
    """Whether a file is read below the crop, so that damage there is an error."""

    def __penstock_rows__(
        self, samples: Sequence[Any], rngs: Iterator[np.random.Generator], ctx: Context
    ) -> list[Any]:
        """Return samples with their images placed: see `on_files`."""
        choices = (partial(self._choose, ctx, rng) for rng in rngs)
        return on_files(samples, choices, to_end=self.TO_END)

    def __penstock_fused__(
        self, following: Sequence[Any], at: int = 0
    ) -> tuple[int, Callable[..., Any]] | None:
        """Take a flip or a central crop along: see engine/program/operations.py."""
        after = following[0] if following else None
        takes = type(after) in (center_crop, horizontal_flip)
        together = partial(fused, self, at, after if takes else None)
        return (at + takes, together) if at or takes else None

    @abstractmethod
    def _choose(
        self, ctx: Context | None, rng: Any, height: int, width: int
    ) -> Placement:
        """Return the placement of an image of this height and width in pixels."""


@dataclass(frozen=True, slots=True)
class random_resized_crop(Placing):
    """Cut a random part out of an image and resize it to a square.

    The rule is torchvision's (see `random_box`). It draws from the sample's `rng`.

    Args:
        size: side of the square in pixels, >= 1; None: the context's `image_size`,
            which a schedule sets.
        scale: smallest and largest share of the image's area, > 0 and <= 1.
        ratio: smallest and largest width / height of the part, > 0.
        antialias: filter when shrinking, as Pillow does; False is faster but aliases.
        per_box: further annotations that have one entry per box, by name.

    Raises:
        SpecError: an argument is out of range.
    """

    size: int | None
    _: KW_ONLY
    scale: Range = (0.08, 1.0)
    ratio: Range = (3 / 4, 4 / 3)
    antialias: bool = True
    per_box: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.size is not None:
            whole_number("size", self.size, 1, USUAL_SIZE)
        check(
            0 < self.scale[0] <= self.scale[1] <= 1,
            "`scale` must be (min, max) with 0 < min <= max <= 1, got"
            f" {self.scale}; (0.08, 1.0) is usual",
        )
        check(
            0 < self.ratio[0] <= self.ratio[1],
            f"`ratio` must be (min, max) with 0 < min <= max, got {self.ratio}; "
            "(3/4, 4/3) is usual",
        )

    def __call__(
        self,
        sample: Any,
        rng: np.random.Generator,
        ctx: Context | None = None,
    ) -> Any:
        """Return the sample with a part of its image, `[size, size]`.

        Raises:
            SampleError: it has no image, or its annotations have wrong shapes.
            SpecError: neither the operator nor the context has a size.
            ValueError: it has the bytes of a file that cannot be decoded.
        """
        return placed_sample(
            sample,
            partial(self._choose, ctx, rng),
            per_box=self.per_box,
            to_end=self.TO_END,
        )

    def _choose(
        self, ctx: Context | None, rng: np.random.Generator, height: int, width: int
    ) -> Placement:
        sides, of = wanted_sides(self.size, ctx), (height, width)
        box = random_box(height, width, scale=self.scale, ratio=self.ratio, rng=rng)
        return Placement(box, *sides, of, antialias=self.antialias)


@dataclass(frozen=True, slots=True)
class horizontal_flip:
    """Exchange left and right of an image with probability `p`.

    Args:
        p: the probability, 0 to 1.
        keypoint_pairs: pairs of keypoints that mirror each other, by their numbers: if
            the left and the right eye are 1 and 2, `((1, 2), ...)`. The two are also
            exchanged.

    Raises:
        SpecError: `p` is out of range.
    """

    p: float = 0.5
    _: KW_ONLY
    keypoint_pairs: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        check_probability("p", self.p)

    def __call__(self, sample: Any, rng: np.random.Generator) -> Any:
        """Return the sample, mirrored or as it is.

        Raises:
            SampleError: it has no image, or its annotations have wrong shapes.
            ValueError: it has the bytes of a file that cannot be decoded.
        """
        sample = typed(sample)  # types do not depend on what is drawn
        if rng.random() >= self.p:
            return on_pixels(sample, lambda image: image)
        return with_pairs(
            placed_sample(sample, lambda *size: Placement.whole(size, mirrored=True)),
            self.keypoint_pairs,
        )


@dataclass(frozen=True, slots=True)
class resize(Placing):
    """Resize an image to `size`, whatever its aspect.

    Args:
        size: (height, width) in pixels, or one number for both; None: the context's
            `image_size`, which a schedule sets.
        antialias: filter when shrinking, as Pillow does; False is faster but aliases.

    Raises:
        SpecError: `size` is not a number of pixels.
    """

    size: int | tuple[int, int] | None
    _: KW_ONLY
    antialias: bool = True

    def __post_init__(self) -> None:
        if self.size is not None:
            for side in wanted_sides(self.size):
                whole_number("size", side, 1, USUAL_SIZE)

    def __call__(self, sample: Any, ctx: Context | None = None) -> Any:
        """Return the sample with its image `[*size]`.

        Raises:
            SampleError: it has no image, or its annotations have wrong shapes.
            SpecError: neither the operator nor the context has a size.
            ValueError: it has the bytes of a file that cannot be decoded.
        """
        return placed_sample(sample, partial(self._choose, ctx, None))

    def _choose(
        self, ctx: Context | None, _: object, height: int, width: int
    ) -> Placement:
        tall, wide = wanted_sides(self.size, ctx)
        return Placement.whole(
            (height, width), height=tall, width=wide, antialias=self.antialias
        )


@dataclass(frozen=True, slots=True)
class resize_short_side(Placing):
    """Resize an image so that its shorter side has `size` pixels; keep its aspect.

    Args:
        size: pixels of the shorter side.
        max_size: most pixels of the longer side. If it would have more, the image is
            made smaller, and the shorter side has less than `size`. None: no limit.
        antialias: filter when shrinking, as Pillow does; False is faster but aliases.

    Raises:
        SpecError: an argument is out of range.
    """

    size: int
    _: KW_ONLY
    max_size: int | None = None
    antialias: bool = True

    def __post_init__(self) -> None:
        whole_number("size", self.size, 1, USUAL_SIZE)
        check(
            self.max_size is None or self.max_size >= self.size,
            f"`max_size` must be at least `size`, {self.size}, got {self.max_size};"
            " size=800, max_size=1333 are usual",
        )

    def __call__(self, sample: Any) -> Any:
        """Return the sample with its image `[h, w]`, where min(h, w) is `size`.

        Raises:
            SampleError: it has no image, or its annotations have wrong shapes.
            ValueError: it has the bytes of a file that cannot be decoded.
        """
        return placed_sample(sample, partial(self._choose, None, None))

    def _choose(self, _: object, __: object, height: int, width: int) -> Placement:
        tall, wide = short_side_size(height, width, self.size, self.max_size)
        return Placement.whole(
            (height, width), height=tall, width=wide, antialias=self.antialias
        )


@dataclass(frozen=True, slots=True)
class center_crop(Placing):
    """Cut a square out of the middle of an image.

    Args:
        size: side of the square in pixels.
        per_box: further annotations that have one entry per box, by name.

    Raises:
        SpecError: `size` is not a number of pixels.
    """

    size: int
    _: KW_ONLY
    per_box: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        whole_number("size", self.size, 1, USUAL_SIZE)

    def __call__(self, sample: Any) -> Any:
        """Return the sample with its image `[size, size]`.

        Raises:
            SampleError: it has no image, or its annotations have wrong shapes.
            ValueError: the image is smaller than that, or has the bytes of a file that
                cannot be decoded.
        """
        return placed_sample(
            sample, partial(self._choose, None, None), per_box=self.per_box
        )

    def _choose(self, _: object, __: object, height: int, width: int) -> Placement:
        if min(height, width) < self.size:
            raise ValueError(
                f"`center_crop({self.size})` needs {self.size} pixels on both sides, "
                f"got {height} x {width}; put resize_short_side({self.size}) before it"
            )
        box = central_box(height, width, self.size, self.size)
        return Placement(box, self.size, self.size, (height, width))


@dataclass(frozen=True, slots=True)
class random_crop:
    """Cut a part of fixed size out of an image, at a uniformly random place.

    Args:
        size: (height, width) of the part in pixels, or one number for both.
        padding: pixels added on each side of the image first, as is usual for CIFAR (He
            et al., "Deep Residual Learning", CVPR 2016, section 4.2, use 4).
        fill: the value of these pixels, 0 to 255: one number, or one per channel.
        mask_fill: their class in a `mask`.
        per_box: further annotations that have one entry per box, by name.

    Raises:
        SpecError: `size` or `padding` is not a number of pixels.
    """

    size: int | tuple[int, int]
    _: KW_ONLY
    padding: int = 0
    fill: Fill = 0
    mask_fill: int = 0
    per_box: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for side in wanted_sides(self.size):
            whole_number("size", side, 1, USUAL_SIZE)
        whole_number("padding", self.padding, 0, "4 pixels are usual")

    def __call__(self, sample: Any, rng: np.random.Generator) -> Any:
        """Return the sample with its image `[*size]`.

        Raises:
            SampleError: it has no image, or its annotations have wrong shapes.
            ValueError: the image, with its padding, is smaller than that, or has the
                bytes of a file that cannot be decoded.
        """
        tall, wide = wanted_sides(self.size)

        def choose(height: int, width: int) -> Placement:
            if height < tall or width < wide:
                raise ValueError(
                    f"`random_crop` needs {tall} x {wide} pixels, got {height} x"
                    f" {width}; put resize_short_side({max(tall, wide)}) before it"
                )
            box = box_at_random(height, width, tall, wide, rng)
            return Placement(box, tall, wide, (height, width))

        if self.padding:
            sample = pad(self.padding, fill=self.fill, mask_fill=self.mask_fill)(sample)
        return placed_sample(sample, choose, per_box=self.per_box)


@dataclass(frozen=True, slots=True)
class pad:
    """Add pixels around an image.

    Args:
        padding: pixels to add on each side: one number, or (left, top, right, bottom).
        to: the smallest (height, width) of the result in pixels, instead of `padding`.
            Pixels are added on the right and at the bottom.
        fill: the value of the new pixels, 0 to 255: one number, or one per channel.
        mask_fill: their class in a `mask`.

    Raises:
        SpecError: `padding` is not a number of pixels, or both `padding` and `to` are
            given.
    """

    padding: int | tuple[int, int, int, int] = 0
    _: KW_ONLY
    to: tuple[int, int] | None = None
    fill: Fill = 0
    mask_fill: int = 0

    def __post_init__(self) -> None:
        sides = self.padding
        for number in sides if isinstance(sides, tuple) else (sides,):
            whole_number("padding", number, 0, "4 pixels are usual")
        check(
            self.to is None or self.padding == 0,
            f"`pad` takes `padding` or `to`, not both, got padding={self.padding}"
            f" and to={self.to}; leave one out",
        )

    def __call__(self, sample: Any) -> Any:
        """Return the sample with its image padded; annotations move with it.

        Raises:
            SampleError: it has no image, or its annotations have wrong shapes.
            ValueError: it has the bytes of a file that cannot be decoded.
        """
        return placed_sample(sample, self._choose, mask_fill=self.mask_fill)

    def _choose(self, height: int, width: int) -> Placement:
        sides = self.padding
        left, top, right, bottom = sides if isinstance(sides, tuple) else (sides,) * 4
        tall, wide = height + top + bottom, width + left + right
        if self.to is not None:
            tall, wide = max(height, self.to[0]), max(width, self.to[1])
        return Placement.whole(
            (height, width), canvas=Box(top, left, tall, wide), fill=self.fill
        )


@dataclass(frozen=True, slots=True)
class decode_random_resized_crop(random_resized_crop):
    """`decode`, `random_resized_crop` and `horizontal_flip` in one, with less decoding.

    The crop is chosen from the size in the file's header. Then the image is decoded at
    the smallest scale that the crop allows. At full scale, the pixels are the same as
    those of the three operators.

    With penstock's extension in C, only the crop of an ordinary JPEG is decoded; pixels
    and errors are the same. `penstock doctor` says whether the extension is installed.

    Args:
        size, scale, ratio, antialias, per_box: as for `random_resized_crop`.
        flip: probability that the crop is mirrored, 0 to 1.
        reducing_gap: decode at 1/2, 1/4 or 1/8 scale if the crop then still has at
            least this many times `size` pixels on both sides, >= 1 (Pillow's `resize`
            has the same option). On 500 ImageNet photos, crops decoded at a reduced
            scale differ from Pillow's at full scale by 1.3/255 on average with 3, and
            by 1.9/255 with 2; crops decoded at full scale differ by 0.02/255.
            `math.inf`: always decode at full scale.

    Raises:
        SpecError: an argument is out of range.
    """

    _: KW_ONLY
    flip: float = 0.0
    reducing_gap: float = 3.0
    decoder: CropDecoder = field(
        default=CropDecoder(), init=False, repr=False, compare=False
    )
    """The decoder. Its version is part of the operator's fingerprint, by which caches
    and ranks compare operators."""

    def __post_init__(self) -> None:
        random_resized_crop.__post_init__(self)
        check_probability("flip", self.flip)
        check(
            self.reducing_gap >= 1,
            f"`reducing_gap` must be >= 1, got {self.reducing_gap}; below that the "
            "crop would be decoded smaller than `size`",
        )

    def __call__(
        self,
        sample: Any,
        rng: np.random.Generator,
        ctx: Context | None = None,
    ) -> Any:
        """Return the sample with a crop `uint8 [size, size, 3]` instead of its bytes.

        Raises:
            SampleError: it does not have the bytes of a file, or its annotations have
                wrong shapes.
            SpecError: neither the operator nor the context has a size.
            ValueError: the file cannot be decoded.
        """
        require_encoded(SampleParts.of(sample).image)
        return random_resized_crop.__call__(self, sample, rng, ctx)

    def _choose(
        self, ctx: Context | None, rng: np.random.Generator, height: int, width: int
    ) -> Placement:
        full = random_resized_crop._choose(self, ctx, rng, height, width)  # noqa: SLF001
        room = min(full.box.height, full.box.width) / (full.width * self.reducing_gap)
        # At scales of 1/8, 1/4 and 1/2, libjpeg decodes faster than at full size.
        factor = next((factor for factor in (8, 4, 2) if factor <= room), 1)
        return replace(full, mirrored=bool(rng.random() < self.flip), factor=factor)


@dataclass(frozen=True, slots=True)
class decode_only_random_resized_crop(decode_random_resized_crop):
    """A faster `decode_random_resized_crop` that ignores damage below the crop.

    It takes the same arguments. With penstock's extension, an ordinary JPEG is read
    only to the last row of the crop, so changed codes below it raise no error. A file
    that was cut off, or whose markers are out of order, is still an error. Without the
    extension, the two operators do the same.
    """

    TO_END: ClassVar[bool] = False


def wanted_sides(
    size: int | tuple[int, int] | None, ctx: Context | None = None
) -> tuple[int, int]:
    """Return (height, width) in pixels; one number stands for both.

    Raises:
        SpecError: `size` is None, and the context has no `image_size` either.
    """
    sides = ctx.image_size if size is None and ctx is not None else size
    if sides is None:
        raise SpecError(
            "`size` is None and the context has no `image_size`; give the operator a "
            "size, or give the pipeline a schedule with image sizes"
        )
    if isinstance(sides, SupportsIndex):  # a number of numpy's, too
        return int(sides), int(sides)
    return sides


def with_pairs(sample: Any, pairs: tuple[tuple[int, int], ...]) -> Any:
    """Return a mirrored sample with the keypoints of each pair exchanged."""
    parts = SampleParts.of(sample)
    if not pairs or parts.target is None or not len(parts.target.get("keypoints", ())):
        return sample
    keypoints = parts.target["keypoints"]
    points = numbers(keypoints, "keypoints")
    order = list(range(points.shape[1]))
    for one, other in pairs:
        order[one], order[other] = other, one
    exchanged = {"keypoints": as_given(points[:, order], keypoints)}
    return parts.with_image(parts.image, {**parts.target, **exchanged})


def check_probability(name: str, value: float) -> None:
    """Check that `value` is a probability.

    Raises:
        SpecError: it is not within 0 to 1.
    """
    check(
        0 <= value <= 1,
        f"`{name}` must be a probability, 0 to 1, got {value}; 0.5 is usual",
    )


def fused(
    placing: Placing,
    at: int,
    after: center_crop | horizontal_flip | None,
    samples: Sequence[Any],
    draws: Iterator[Callable[[int], Any]],
    ctx: Context,
) -> list[Any]:
    """Make several samples as operators in separate maps do, in one native call.

    Args:
        placing: the operator that places.
        at: which of them it is: 1 after `decode`.
        after: the one after it, if it goes along.
        samples: what the first of them takes.
        draws: for each, what returns the generator of the operator with a number.
        ctx: the context of all.

    Returns:
        The samples, or None, as `on_files` does.
    """

    def choose(draw: Callable[[int], Any], height: int, width: int) -> Placement:
        placement = placing._choose(ctx, draw(at), height, width)  # noqa: SLF001
        if isinstance(after, horizontal_flip):
            mirrors = draw(at + 1).random() < after.p
            return replace(placement, mirrored=placement.mirrored != mirrors)
        return placement

    choices = (partial(choose, draw) for draw in draws)
    results = on_files(samples, choices, to_end=placing.TO_END)
    if isinstance(after, center_crop):
        return [sample if sample is None else after(sample) for sample in results]
    return results


def after_decoding(following: Sequence[Any]) -> tuple[int, Callable[..., Any]] | None:
    """Let `decode` leave the pixels to an operator that needs only some of them."""
    kinds = random_resized_crop, resize, resize_short_side, center_crop
    if not following or type(following[0]) not in kinds:
        return None
    placing: Placing = following[0]
    return placing.__penstock_fused__(following[1:], 1)


vars(decode)["__penstock_fused__"] = after_decoding
