"""Operators in maps of their own: the same samples and errors as without fusion."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import PIL.Image
import pytest

import penstock as ps
from penstock import image
from penstock.engine.program.operations import Fused, with_fused_maps
from penstock.engine.program.program import Map

from .test_crop_decoder import SAMPLINGS, jpeg, noise

FILES = [
    jpeg(noise(70 + at, 90 - at, at), sampling) for at, sampling in enumerate(SAMPLINGS)
]
CHAINS: dict[str, tuple[Any, ...]] = {
    "crop": (image.decode, image.random_resized_crop(32)),
    "crop and flip": (
        image.decode,
        image.random_resized_crop(32),
        image.horizontal_flip(),
    ),
    "aliased": (
        image.decode,
        image.random_resized_crop(32, antialias=False),
        image.horizontal_flip(0.7),
    ),
    "validation": (
        image.decode,
        image.resize_short_side(48),
        image.center_crop(40),
        image.horizontal_flip(),
    ),
    "resize": (image.decode, image.resize((31, 50)), image.horizontal_flip(1.0)),
    "central": (image.decode, image.center_crop(64), image.horizontal_flip()),
    "too large": (image.decode, image.center_crop(72)),
    "without decode": (
        image.decode_random_resized_crop(32, flip=0.5),
        image.horizontal_flip(),
    ),
    "a function after": (
        image.decode,
        image.random_resized_crop(32),
        image.rand_augment(),
    ),
}


class Alone:
    """Calls an operator, and hides what else it offers."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function


class Plain(Alone):
    def __call__(self, sample: Any) -> Any:
        return self.function(sample)


class Drawing(Alone):
    def __call__(self, sample: Any, rng: np.random.Generator, ctx: ps.Context) -> Any:
        wants = {"rng": rng, "ctx": ctx}
        code = type(self.function).__call__.__code__
        names = code.co_varnames[: code.co_argcount]
        return self.function(sample, **{n: wants[n] for n in wants if n in names})


def alone(function: Callable[..., Any]) -> Alone:
    return Plain(function) if function is image.decode else Drawing(function)


def png() -> bytes:
    content = io.BytesIO()
    PIL.Image.fromarray(noise(64, 80)).save(content, "PNG")
    return content.getvalue()


BOXES = {"boxes": np.array([[3.0, 4.0, 40.0, 50.0]]), "labels": [1]}
CUT = FILES[1][: len(FILES[1]) // 2]
GOOD: list[Any] = [*enumerate(FILES), (7, png()), (8, {"image": FILES[0], **BOXES})]
BAD = {"nothing": b"", "cut": CUT, "words": b"no image", "a number": 3}


class Data:
    """Each sample twice, with its number, as an operator takes it."""

    def __len__(self) -> int:
        return 2 * len(GOOD)

    def __getitem__(self, at: int) -> Any:
        number, sample = GOOD[at % len(GOOD)]
        return sample if isinstance(sample, dict) else (sample, number)


def run(data: Any, functions: tuple[Any, ...]) -> list[Any]:
    """Return all samples of two epochs."""
    pipe = ps.Pipeline.from_dataset(data).shuffle(seed=1)
    for function in functions:
        pipe = pipe.map(function)
    with pipe.batch(5, collate_fn=list) as batches:
        return [sample for _ in range(2) for batch in batches for sample in batch]


@pytest.mark.parametrize("chain", CHAINS)
def test_fused_operators_make_what_they_make_alone(chain: str) -> None:
    functions = CHAINS[chain]
    data = [FILES[0]] * 9 if chain == "without decode" else Data()
    if chain == "too large":
        data = [jpeg(noise(72, 80), "420")] * 9
    samples, expected = run(data, functions), run(data, tuple(map(alone, functions)))
    assert len(samples) == 2 * len(data)
    for one, other in zip(samples, expected, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("chain", ["crop and flip", "validation", "too large"])
def test_errors_are_those_of_the_operator_that_fails(chain: str, bad: str) -> None:
    functions = CHAINS[chain]
    errors = []
    for operators in functions, tuple(map(alone, functions)):
        with pytest.raises((ValueError, ps.SampleError)) as caught:
            run([FILES[0], FILES[1], BAD[bad]], operators)
        error: Any = caught.value
        notes = re.sub(r"(Map\(ID:\d\)) \w+", r"\1", " ".join(error.__notes__))
        errors.append((type(error), str(error), notes))
    assert errors[0] == errors[1]


def test_the_size_of_an_image_is_checked_by_the_operator_that_needs_it() -> None:
    with pytest.raises(ValueError, match="center_crop") as caught:
        run([FILES[0]], CHAINS["too large"])
    assert "Map(ID:3) center_crop" in " ".join(caught.value.__notes__)


def test_one_stage_does_what_several_did() -> None:
    maps = [
        Map(f"Map(ID:{n}) {name}", n, function)
        for n, (name, function) in enumerate(
            zip(("decode", "crop", "flip"), CHAINS["crop and flip"], strict=True), 1
        )
    ]
    (fused,) = with_fused_maps(maps)
    assert isinstance(fused, Fused)
    assert fused.stage == "Map(ID:1) decode + crop + flip"


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        one, other = tuple(one.values()), tuple(other.values())
    if isinstance(one, tuple):
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    else:
        assert np.array_equal(one, other)
