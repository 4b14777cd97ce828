"""Calls of MindSpore's operators; `python mindspore_cases.py FILE` makes them.

With the real package (`pip install mindspore==2.10.0 pillow` in an environment of its
own) the command writes inputs and results to FILE. The tests make the same calls of
`penstock.mindspore`, and compare. The file needs nothing of penstock.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL.Image
from numpy.typing import NDArray

Array = NDArray[Any]
HEIGHT, WIDTH = 21, 29
DRAWS = 800
"""Results of each random operator."""


@dataclass(frozen=True)
class Case:
    """One call."""

    make: Callable[[Any, Any], Any]
    """Returns an operator, from the modules `vision` and `transforms`."""
    given: str = "photo"
    """The name of its input; "picture" is the photo as an image of Pillow."""
    within: float = 0
    """The largest difference from MindSpore's result, as measured."""


def inputs() -> dict[str, Array]:
    """Return the inputs by name."""
    rng = np.random.default_rng(47)
    coarse = rng.integers(0, 256, (6, 8, 3), np.uint8)
    picture = PIL.Image.fromarray(coarse).resize((WIDTH, HEIGHT), PIL.Image.BICUBIC)
    photo = np.array(picture)
    photo[4:9, 5:12] = rng.integers(0, 256, (5, 7, 3), np.uint8)
    data = io.BytesIO()
    PIL.Image.fromarray(photo).save(data, "JPEG", quality=90)
    full = io.BytesIO()
    PIL.Image.fromarray(photo).save(full, "JPEG", quality=90, subsampling=0)
    flat = io.BytesIO()
    picture.quantize(32).save(flat, "PNG")
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH].astype(np.uint8)
    return {
        "photo": photo,
        "gray": photo[..., 0].copy(),
        "thin": photo[..., :1].copy(),
        "floats": photo[:12, :14].astype(np.float32) / 7,
        "planes": photo[:12, :14].transpose(2, 0, 1).copy() / np.float32(255),
        "jpeg": np.frombuffer(data.getvalue(), np.uint8),
        "full jpeg": np.frombuffer(full.getvalue(), np.uint8),
        "png": np.frombuffer(flat.getvalue(), np.uint8),
        "places": np.stack([y + 1, x + 1, np.zeros_like(x)], axis=2),
        "ones": np.ones((3, HEIGHT, WIDTH), np.float32),
        "ramp": np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, 2),
        "label": np.int32(3),
        "labels": np.array([0, 4, 2], np.uint16),
        "numbers": np.array([1.7, -1.7, 0.0, 254.2]),
    }


def given(arrays: Mapping[str, Array], name: str) -> Any:
    """Return the input of this name."""
    return PIL.Image.fromarray(arrays["photo"]) if name == "picture" else arrays[name]


CASES: dict[str, Case] = {
    "decode jpeg": Case(lambda v, t: v.Decode(), "jpeg"),
    "decode png": Case(lambda v, t: v.Decode(), "png"),
    "decode to pil": Case(lambda v, t: v.Decode(to_pil=True), "jpeg"),
    "resize smaller": Case(lambda v, t: v.Resize((10, 17)), within=1),
    "resize larger": Case(lambda v, t: v.Resize((27, 33)), within=1),
    "resize half": Case(lambda v, t: v.Resize((10, 58)), within=1),
    "resize short side": Case(lambda v, t: v.Resize(13), within=1),
    "resize same side": Case(lambda v, t: v.Resize(21), within=1),
    "resize gray": Case(lambda v, t: v.Resize((10, 17)), "gray", 1),
    "resize floats": Case(lambda v, t: v.Resize((7, 9)), "floats", 1e-4),
    "resize cubic": Case(lambda v, t: v.Resize((10, 17), v.Inter.BICUBIC), within=1),
    "resize cubic larger": Case(lambda v, t: v.Resize(25, v.Inter.CUBIC), within=1),
    "resize nearest": Case(lambda v, t: v.Resize((10, 17), v.Inter.NEAREST)),
    "resize nearest larger": Case(lambda v, t: v.Resize((42, 30), v.Inter.NEAREST)),
    "resize area": Case(lambda v, t: v.Resize((10, 17), v.Inter.AREA), within=1),
    "resize area larger": Case(lambda v, t: v.Resize((27, 33), v.Inter.AREA), within=1),
    "resize area both": Case(lambda v, t: v.Resize((10, 40), v.Inter.AREA), within=1),
    "resize pilcubic": Case(lambda v, t: v.Resize((10, 17), v.Inter.PILCUBIC)),
    "resize picture": Case(lambda v, t: v.Resize((10, 17)), "picture"),
    "resize picture side": Case(lambda v, t: v.Resize(13), "picture"),
    "resize picture cubic": Case(
        lambda v, t: v.Resize((10, 17), v.Inter.BICUBIC), "picture"
    ),
    "resize picture antialias": Case(
        lambda v, t: v.Resize((10, 17), v.Inter.ANTIALIAS), "picture"
    ),
    "center crop": Case(lambda v, t: v.CenterCrop((10, 12))),
    "center crop larger": Case(lambda v, t: v.CenterCrop((24, 12))),
    "center crop picture": Case(lambda v, t: v.CenterCrop((10, 12)), "picture"),
    "center crop larger picture": Case(lambda v, t: v.CenterCrop((24, 32)), "picture"),
    "crop": Case(lambda v, t: v.Crop((3, 5), (10, 12))),
    "pad": Case(lambda v, t: v.Pad((1, 2, 3, 4), (9, 8, 7))),
    "pad gray": Case(lambda v, t: v.Pad((1, 2), 9), "gray"),
    "pad edge": Case(lambda v, t: v.Pad(3, 0, v.Border.EDGE)),
    "pad reflect": Case(lambda v, t: v.Pad(3, 0, v.Border.REFLECT)),
    "pad symmetric": Case(lambda v, t: v.Pad(3, 0, v.Border.SYMMETRIC)),
    "pad picture": Case(lambda v, t: v.Pad((1, 2, 3, 4), (9, 8, 7)), "picture"),
    "random crop whole": Case(
        lambda v, t: v.RandomCrop((23, 35), (3, 1), fill_value=(1, 2, 3))
    ),
    "resized crop whole": Case(
        lambda v, t: v.RandomResizedCrop((9, 11), (1, 1), (29 / 21, 29 / 21)), within=1
    ),
    "resized crop picture": Case(
        lambda v, t: v.RandomResizedCrop((9, 11), (1, 1), (29 / 21, 29 / 21)), "picture"
    ),
    "resized crop fallback": Case(
        lambda v, t: v.RandomResizedCrop((9, 11), (3, 3), (1, 1)), within=1
    ),
    "crop decode resize": Case(
        lambda v, t: v.RandomCropDecodeResize((9, 11), (1, 1), (29 / 21, 29 / 21)),
        "jpeg",
        1,
    ),
    "crop decode resize fallback": Case(
        lambda v, t: v.RandomCropDecodeResize(9, (3, 3), (0.5, 0.5), v.Inter.BICUBIC),
        "full jpeg",  # else MindSpore's last column has other colors
        1,
    ),
    "horizontal flip": Case(lambda v, t: v.RandomHorizontalFlip(1.0)),
    "horizontal flip gray": Case(lambda v, t: v.RandomHorizontalFlip(1.0), "gray"),
    "horizontal flip picture": Case(
        lambda v, t: v.RandomHorizontalFlip(1.0), "picture"
    ),
    "vertical flip": Case(lambda v, t: v.RandomVerticalFlip(1.0)),
    "rotation": Case(lambda v, t: v.RandomRotation((30, 30), fill_value=(1, 2, 3))),
    "rotation linear": Case(
        lambda v, t: v.RandomRotation((200.5, 200.5), v.Inter.BILINEAR), within=1
    ),
    "rotation center": Case(lambda v, t: v.RandomRotation((30, 30), center=(10, 5))),
    "rotation expand": Case(lambda v, t: v.RandomRotation((10, 10), expand=True)),
    "rotation gray": Case(lambda v, t: v.RandomRotation((30, 30)), "gray"),
    "rotation picture": Case(
        lambda v, t: v.RandomRotation((30, 30), fill_value=(1, 2, 3)), "picture"
    ),
    "affine": Case(
        lambda v, t: v.RandomAffine(
            (20, 20),
            (0.1, 0.1, -0.2, -0.2),
            (0.8, 0.8),
            (10, 10, 5, 5),
            fill_value=(1, 2, 3),
        )
    ),
    "affine linear": Case(
        lambda v, t: v.RandomAffine(
            (20, 20), (0.1, 0.1), (1.2, 1.2), (10, 10), v.Inter.LINEAR
        ),
        within=1,
    ),
    "brightness": Case(lambda v, t: v.RandomColorAdjust(brightness=(1.4, 1.4))),
    "brightness picture": Case(
        lambda v, t: v.RandomColorAdjust(brightness=(1, 1)), "picture"
    ),
    "contrast": Case(lambda v, t: v.RandomColorAdjust(contrast=(0.3, 0.3)), within=1),
    "saturation": Case(
        lambda v, t: v.RandomColorAdjust(saturation=(0.3, 0.3)), within=1
    ),
    "hue": Case(lambda v, t: v.RandomColorAdjust(hue=(0.1, 0.1)), within=1),
    "hue back": Case(lambda v, t: v.RandomColorAdjust(hue=(-0.3, -0.3)), within=1),
    "color": Case(lambda v, t: v.RandomColor((1.6, 1.6)), within=1),
    "color picture": Case(lambda v, t: v.RandomColor((1.6, 1.6)), "picture"),
    "sharpness": Case(lambda v, t: v.RandomSharpness((1.6, 1.6))),
    "sharpness blurs": Case(lambda v, t: v.RandomSharpness((0, 0))),
    "sharpness gray": Case(lambda v, t: v.RandomSharpness((1.6, 1.6)), "gray"),
    "sharpness picture": Case(lambda v, t: v.RandomSharpness((1.6, 1.6)), "picture"),
    "auto contrast": Case(lambda v, t: v.AutoContrast()),
    "auto contrast cutoff": Case(lambda v, t: v.AutoContrast(10.0, [10, 20]), within=1),
    "auto contrast thin": Case(lambda v, t: v.AutoContrast(), "thin"),
    "auto contrast picture": Case(lambda v, t: v.AutoContrast(5.0), "picture"),
    "equalize": Case(lambda v, t: v.Equalize(), within=1),
    "equalize gray": Case(lambda v, t: v.Equalize(), "gray", 1),
    "equalize picture": Case(lambda v, t: v.Equalize(), "picture"),
    "invert": Case(lambda v, t: v.Invert()),
    "invert picture": Case(lambda v, t: v.Invert(), "picture"),
    "posterize": Case(lambda v, t: v.RandomPosterize(3)),
    "solarize": Case(lambda v, t: v.RandomSolarize((100, 100))),
    "grayscale": Case(lambda v, t: v.RandomGrayscale(1.0), "picture"),
    "to pil": Case(lambda v, t: v.ToPIL()),
    "to pil thin": Case(lambda v, t: v.ToPIL(), "thin"),
    "to tensor": Case(lambda v, t: v.ToTensor()),
    "to tensor gray": Case(lambda v, t: v.ToTensor(), "gray"),
    "to tensor picture": Case(lambda v, t: v.ToTensor(), "picture"),
    "to tensor half": Case(lambda v, t: v.ToTensor(np.float16)),
    "channels first": Case(lambda v, t: v.HWC2CHW()),
    "channels first gray": Case(lambda v, t: v.HWC2CHW(), "gray"),
    "rescale": Case(lambda v, t: v.Rescale(1 / 255, -0.5), within=1e-7),
    "normalize": Case(lambda v, t: v.Normalize([10.0, 20, 30], [2.0, 3, 4])),
    "normalize floats": Case(
        lambda v, t: v.Normalize([10.0, 20, 30], [2.0, 3, 4]), "floats"
    ),
    "normalize one": Case(lambda v, t: v.Normalize([10.0], [2.0]), "gray"),
    "normalize planes": Case(
        lambda v, t: v.Normalize([0.4, 0.5, 0.6], [0.2, 0.3, 0.4], is_hwc=False),
        "planes",
        1e-6,
    ),
    "subpolicy": Case(lambda v, t: v.RandomSelectSubpolicy([[(v.Invert(), 1.0)]])),
    "apply": Case(lambda v, t: t.RandomApply([v.Invert(), v.CenterCrop(5)], 1.0)),
    "choice": Case(lambda v, t: t.RandomChoice([v.CenterCrop(5)])),
    "compose": Case(lambda v, t: t.Compose([v.Resize(9), v.HWC2CHW()]), within=1),
    "compose python": Case(
        lambda v, t: t.Compose([v.ToPIL(), v.CenterCrop(9), v.ToTensor()])
    ),
    "one hot": Case(lambda v, t: t.OneHot(5), "label"),
    "one hot several": Case(lambda v, t: t.OneHot(5), "labels"),
    "one hot smooth": Case(lambda v, t: t.OneHot(5, 0.1), "label", 1e-7),
    "type cast": Case(lambda v, t: t.TypeCast(np.int32), "numbers"),
    "type cast bytes": Case(lambda v, t: t.TypeCast(np.uint8), "numbers"),
    "type cast bool": Case(lambda v, t: t.TypeCast(np.bool_), "numbers"),
    "type cast half": Case(lambda v, t: t.TypeCast(np.float16), "numbers"),
}


def placed(result: Array) -> tuple[float, ...]:
    """Return where the corner and the middle of a result come from."""
    return (*result[0, 0, :2], *result[result.shape[0] // 2, result.shape[1] // 2, :2])


def zeros(array: Array) -> tuple[float, ...]:
    """Return where the zeros of an array begin, and how many there are."""
    rows, columns = np.nonzero(array[..., 0] == 0)
    if not len(rows):
        return -1, -1, -1
    return rows.min(), columns.min(), len(rows)


RANDOM: dict[str, tuple[Case, Callable[[Array], tuple[float, ...]]]] = {
    "resized crop": (
        Case(
            lambda v, t: v.RandomResizedCrop((2, 2), interpolation=v.Inter.NEAREST),
            "places",
        ),
        placed,
    ),
    "random crop": (
        Case(
            lambda v, t: v.RandomCrop((9, 11), 3, padding_mode=v.Border.EDGE), "places"
        ),
        placed,
    ),
    "crop if needed": (
        Case(lambda v, t: v.RandomCrop((25, 40), pad_if_needed=True), "places"),
        lambda result: placed(result)[2:],
    ),
    "horizontal flip": (
        Case(lambda v, t: v.RandomHorizontalFlip(0.3), "places"),
        placed,
    ),
    "rotation": (Case(lambda v, t: v.RandomRotation(30), "places"), placed),
    "affine": (
        Case(
            lambda v, t: v.RandomAffine(
                15, (-0.1, 0.2, -0.2, 0.1), (0.8, 1.5), (-5, 9, -4, 8)
            ),
            "places",
        ),
        placed,
    ),
    "cut out": (Case(lambda v, t: v.CutOut(7, 1), "places"), zeros),
    "color adjust": (
        Case(lambda v, t: v.RandomColorAdjust(0.4, 0.3, 0.2), "photo"),
        lambda result: tuple(result[10, 14]),
    ),
    "hue": (
        Case(lambda v, t: v.RandomColorAdjust(0.4, 0.3, 0.2, 0.1), "photo"),
        lambda result: tuple(result[10, 14]),
    ),
    "color": (
        Case(lambda v, t: v.RandomColor(), "photo"),
        lambda result: tuple(result[10, 14]),
    ),
    "posterize": (
        Case(lambda v, t: v.RandomPosterize((3, 6)), "ramp"),
        lambda result: (result.max(),),
    ),
    "solarize": (
        Case(lambda v, t: v.RandomSolarize((50, 200)), "ramp"),
        lambda result: (
            np.flatnonzero(result[..., 0].ravel() != np.arange(256)).min(),
            (result[..., 0].ravel() != np.arange(256)).sum(),
        ),
    ),
    "erasing": (
        Case(lambda v, t: v.RandomErasing(0.7), "ones"),
        lambda result: zeros(result.transpose(1, 2, 0)),
    ),
    "resize": (
        Case(lambda v, t: v.RandomResize((10, 17)), "photo"),
        lambda result: (round(result.std() * 4),),
    ),
    "apply": (
        Case(lambda v, t: t.RandomApply([v.Invert(), v.CenterCrop(5)], 0.3), "photo"),
        lambda result: (len(result), result[0, 0, 0]),
    ),
    "choice": (
        Case(
            lambda v, t: t.RandomChoice([v.CenterCrop(n) for n in (5, 7, 8)]), "photo"
        ),
        lambda result: (len(result),),
    ),
    "subpolicy": (
        Case(
            lambda v, t: v.RandomSelectSubpolicy(
                [
                    [(v.Invert(), 0.5), (v.CenterCrop(4), 0.2)],
                    [(v.CenterCrop(5), 1.0)],
                ]
            ),
            "photo",
        ),
        lambda result: (len(result), result[1, 1, 0]),
    ),
}
"""Random operators, and what is compared of each result: a few numbers."""


def arrays_of(result: Any) -> list[Array]:
    """Return a result as arrays; images of Pillow become arrays."""
    return [
        np.asarray(it) for it in (result if isinstance(result, tuple) else (result,))
    ]


def main(file: str) -> None:
    """Write inputs and results of the real package."""
    from mindspore.dataset import transforms, vision

    arrays = inputs()
    entries = {f"given {name}": value for name, value in arrays.items()}
    for name, case in CASES.items():
        result = case.make(vision, transforms)(given(arrays, case.given))
        for at, array in enumerate(arrays_of(result)):
            entries[f"{name} {at}"] = array
    for name, (case, summarize) in RANDOM.items():
        operator, image = case.make(vision, transforms), given(arrays, case.given)
        draws = [summarize(arrays_of(operator(image))[0]) for _ in range(DRAWS)]
        entries[f"drawn {name}"] = np.array(draws).astype(np.int16)
    np.savez_compressed(file, **entries)


if __name__ == "__main__":
    main(sys.argv[1])
