"""Operators of `penstock.mindspore` do what MindSpore's do.

`golden/mindspore_operators.npz` has inputs, and what the real package made of them.
`python tests/support/mindspore_cases.py tests/golden/mindspore_operators.npz` made it,
in an environment with mindspore 2.10.0 and pillow.
"""

from __future__ import annotations

import importlib
import inspect
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from numpy.typing import NDArray

import penstock as ps
import penstock.mindspore as ds
import penstock.mindspore.transforms as t
import penstock.mindspore.vision as v
import penstock.mindspore.vision.c_transforms as C  # noqa: N812 as scripts write
import penstock.mindspore.vision.py_transforms as P  # noqa: N812
from penstock.errors import SampleError, SpecError
from penstock.mindspore.drawing import RandomOperator
from support.mindspore_cases import CASES, DRAWS, RANDOM, arrays_of, given

Array = NDArray[Any]
GOLDEN = dict(np.load(Path(__file__).parent / "golden" / "mindspore_operators.npz"))
INPUTS = {
    name.removeprefix("given "): array
    for name, array in GOLDEN.items()
    if name.startswith("given ")
}
DISTANCE = 1.95 * (2 / DRAWS) ** 0.5
"""Two samples of one distribution are this far apart once in 1000 times (Kolmogorov and
Smirnov)."""


@pytest.mark.parametrize("name", CASES)
def test_a_result_is_the_real_ones_but_for_rounding(name: str) -> None:
    case = CASES[name]
    source = given(INPUTS, case.given)
    before = np.array(source)
    arrays = arrays_of(case.make(v, t)(source))
    expected = [GOLDEN[f"{name} {at}"] for at in range(len(arrays))]
    for ours, theirs in zip(arrays, expected, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        difference = np.abs(ours.astype(np.float64) - theirs.astype(np.float64))
        assert difference.max() <= case.within
    np.testing.assert_array_equal(np.array(source), before)  # it stays as it was


@pytest.mark.parametrize("name", RANDOM)
def test_draws_have_the_real_ones_distribution(name: str) -> None:
    case, measure = RANDOM[name]
    operator, source = case.make(v, t), given(INPUTS, case.given)
    ours = [
        measure(arrays_of(operator(source, rng=np.random.default_rng(seed)))[0])
        for seed in range(DRAWS)
    ]
    for one, other in zip(np.array(ours).T, GOLDEN[f"drawn {name}"].T, strict=True):
        assert distance(one.astype(np.int16), other) < DISTANCE


def distance(one: Array, other: Array) -> float:
    """Return the largest difference of two samples' shares below any value."""
    at = np.concatenate([one, other])
    shares = [
        np.searchsorted(np.sort(sample), at, side="right") / len(sample)
        for sample in (one, other)
    ]
    return float(np.abs(shares[0] - shares[1]).max())


def test_a_wrong_distribution_is_noticed() -> None:
    case, measure = RANDOM["resized crop"]
    wide = v.RandomResizedCrop((2, 2), (0.3, 1.0), interpolation=v.Inter.NEAREST)
    source = given(INPUTS, case.given)
    ours = [
        measure(wide(source, np.random.default_rng(seed)))[0] for seed in range(DRAWS)
    ]
    assert distance(np.array(ours), GOLDEN["drawn resized crop"][:, 0]) > DISTANCE


def test_every_operator_is_compared() -> None:
    def parts(operator: Any) -> set[str]:
        inner = getattr(operator, "transforms", ())
        return {type(operator).__name__}.union(*map(parts, inner))

    cases = [*CASES.values(), *(case for case, _ in RANDOM.values())]
    operators = set().union(*(parts(case.make(v, t)) for case in cases))
    names = {name for module in (v, t) for name in module.__all__ if name[0].isupper()}
    assert names - operators == {"Border", "Inter", "Compose"}
    assert {"Composed", "RandomComposed"} & operators == {"Composed"}


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_part_of_a_file_is_the_part_of_its_image(kind: str) -> None:
    file = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (9, 14, 3), np.uint8)
    PIL.Image.fromarray(noise).resize((140, 90)).save(file, kind)
    pixels = v.Decode()(file.getvalue())
    for seed in range(20):
        of_file, of_image = (
            operator(32)(source, rng=np.random.default_rng(seed))
            for operator, source in (
                (v.RandomCropDecodeResize, np.frombuffer(file.getvalue(), np.uint8)),
                (v.RandomResizedCrop, pixels),
            )
        )
        np.testing.assert_array_equal(of_file, of_image)


class Photos:
    """Sixteen images."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Array:
        return np.random.default_rng(index).integers(0, 256, (40, 50, 3), np.uint8)


def test_draws_do_not_depend_on_the_number_of_workers() -> None:
    augment = t.Compose(
        [
            v.RandomResizedCrop(24),
            v.RandomHorizontalFlip(),
            t.RandomApply([v.RandomColorAdjust(0.4, 0.4, 0.4, 0.1)], 0.8),
            v.RandomSelectSubpolicy([[(v.RandomAffine(20, (0, 0.2)), 0.5)]]),
            v.RandomRotation(15),
            v.CutOut(5),
            v.HWC2CHW(),
        ]
    )

    def batches(workers: int, executor: Any) -> Array:
        pipe = ps.Pipeline.from_dataset(Photos(), executor="inline")
        pipe = pipe.map(augment, num_parallel_workers=workers, executor=executor)
        with pipe.batch(4) as pipe:
            return np.stack([np.asarray(batch) for batch in pipe])

    alone = batches(1, "inline")
    np.testing.assert_array_equal(batches(3, "process"), alone)
    np.testing.assert_array_equal(batches(2, "thread"), alone)
    assert len({image.tobytes() for image in alone.reshape(16, -1)}) == 16


def test_called_directly_they_draw_from_numpys_global_generator() -> None:
    image, crop = Photos()[0], v.RandomResizedCrop(24)
    np.random.seed(5)  # noqa: NPY002 the global one
    first, second = crop(image), crop(image)
    np.random.seed(5)  # noqa: NPY002
    np.testing.assert_array_equal(crop(image), first)
    assert not np.array_equal(first, second)


def test_an_operator_asks_for_a_generator_only_if_it_draws() -> None:
    def wants(operator: Any) -> bool:
        return "rng" in inspect.signature(operator).parameters

    assert not wants(v.Resize(5))
    assert not wants(t.Compose([v.Resize(5), v.ToTensor()]))
    assert wants(v.RandomCrop(5))
    assert wants(t.Compose([v.Resize(5), v.RandomCrop(5)]))
    assert wants(t.Compose([t.Compose([v.RandomCrop(5)])]))


@pytest.mark.parametrize("name", CASES)
def test_operators_can_be_sent_to_other_processes(name: str) -> None:
    operator = CASES[name].make(v, t)
    copy = pickle.loads(pickle.dumps(operator))  # noqa: S301 our own
    assert repr(copy) == repr(operator)
    draws = isinstance(operator, RandomOperator)
    result, again = (
        transform(given(INPUTS, CASES[name].given), **extras)
        for transform in (operator, copy)
        for extras in [{"rng": np.random.default_rng(1)} if draws else {}]
    )
    for one, other in zip(arrays_of(result), arrays_of(again), strict=True):
        np.testing.assert_array_equal(one, other)


OLDER = {
    "vision.c_transforms": v,
    "vision.transforms": v,
    "transforms.c_transforms": t,
    "transforms.py_transforms": t,
    "transforms.transforms": t,
    "transforms.vision": v,
    "transforms.vision.c_transforms": v,
    "transforms.vision.py_transforms": P,
}


@pytest.mark.parametrize("name", OLDER)
def test_modules_have_their_older_names_too(name: str) -> None:
    assert importlib.import_module(f"penstock.mindspore.{name}") is OLDER[name]
    module: Any = ds
    for part in name.split("."):
        module = getattr(module, part)
    assert module is OLDER[name]


def test_older_operators_have_their_own_defaults() -> None:
    file, image = INPUTS["jpeg"], INPUTS["photo"]
    assert isinstance(C.Decode()(file), np.ndarray)
    picture = P.Decode()(file.tobytes())
    assert isinstance(picture, PIL.Image.Image)
    planes = P.ToTensor()(picture)
    normal = P.Normalize([0.5, 0.4, 0.3], [0.2, 0.2, 0.1])(planes)
    np.testing.assert_allclose(normal[2], (planes[2] - 0.3) / 0.1, rtol=1e-5, atol=1e-6)
    normal = C.Normalize([120.0, 110.0, 100.0], [60.0, 60.0, 50.0])(image)
    np.testing.assert_allclose(normal[..., 2], (image[..., 2] - 100.0) / 50, rtol=1e-6)


def test_compose_returns_a_tuple_where_mindspore_does() -> None:
    image = INPUTS["photo"]
    (tensor,) = t.Compose([v.ToPIL(), v.ToTensor()])(image)
    assert tensor.shape == (3, *image.shape[:2])
    assert t.Compose([v.HWC2CHW()])(image).shape == tensor.shape
    pair = t.Compose([lambda one, other: (other, one), lambda a, b: (a, b + 1)])
    assert pair(1, 2) == (2, 2)


class Int32:
    """Prints as a type of MindSpore does."""

    def __str__(self) -> str:
        return "Int32"


@pytest.mark.parametrize(
    "given_type", ["int32", np.int32, np.dtype("int32"), torch.int32, Int32()]
)
def test_types_may_be_of_any_library(given_type: Any) -> None:
    assert t.TypeCast(given_type)([1.9]).tolist() == [1]
    assert t.TypeCast(given_type)([1.9]).dtype == np.int32
    assert v.ToTensor(given_type)(INPUTS["photo"]).dtype == np.int32


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "size": (lambda: v.Resize(0), "`size` must be an int >= 1, got 0"),
    "text": (lambda: v.Resize("a"), "`size` must be an int or"),  # type: ignore[arg-type]
    "number": (lambda: v.Resize(5, 2), "one of vision.Inter, got 2"),  # type: ignore[arg-type]
    "mean": (lambda: v.Normalize([300], [1]), r"got \[300\] and \[1\]"),
    "std": (lambda: v.Normalize([1], [0]), "`std` above 0"),
    "lengths": (lambda: v.Normalize([1, 2], [1]), r"got \[1, 2\] and \[1\]"),
    "lists": (lambda: v.Normalize(0.5, 0.5), "lists with a number"),  # type: ignore[arg-type]
    "prob": (lambda: v.RandomHorizontalFlip(2), "0 to 1, got 2"),
    "padding": (lambda: v.RandomCrop(5, -1), "`padding` must be an int >= 0, got -1"),
    "scale": (lambda: v.RandomResizedCrop(5, (1, 0.1)), r"got \(1, 0.1\)"),
    "color": (lambda: v.RandomColorAdjust(-1), "`brightness` must be >= 0"),
    "hue": (lambda: v.RandomColorAdjust(hue=0.7), "-0.5 <= min <= max <= 0.5"),
    "degrees": (lambda: v.RandomRotation(-1), "`degrees` must be >= 0"),
    "translate": (lambda: v.RandomAffine(0, (1,)), r"numbers, got \(1,\)"),
    "shift": (lambda: v.RandomAffine(0, 0.1), "numbers, got 0.1"),  # type: ignore[arg-type]
    "fill": (lambda: v.Pad(1, 256), "0 to 255, or three such numbers, got 256"),
    "bits": (lambda: v.RandomPosterize(9), "1 <= min <= max <= 8"),
    "smoothing": (lambda: t.OneHot(2, 3.0), "0 to 1, got 3.0"),
    "type": (lambda: t.TypeCast("foo"), "got 'foo'; np.int32"),
    "nothing": (lambda: t.Compose([]), r"got \[\]"),
    "policy": (lambda: v.RandomSelectSubpolicy([[]]), r"got \[\[\]\]"),
    "value": (lambda: v.RandomErasing(value="noise"), "got 'noise'"),
    "antialias": (
        lambda: v.Resize(5, v.Inter.ANTIALIAS)(INPUTS["photo"]),
        "for Pillow images, got an array",
    ),
    "area": (
        lambda: v.Resize(5, v.Inter.AREA)(given(INPUTS, "picture")),
        "cannot be resized with Inter.AREA",
    ),
    "cubic": (
        lambda: v.RandomRotation(5, v.Inter.CUBIC)(INPUTS["photo"]),
        "got Inter.BICUBIC",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named_with_its_rule(name: str) -> None:
    make, text = WRONG[name]
    with pytest.raises(SpecError, match=text):
        make()


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "decoded": (v.Decode(), INPUTS["photo"], "leave Decode.. out"),
    "list": (v.Resize(3), [1, 2], "got list"),
    "bytes": (v.Resize(3), b"12", "put vision.Decode.. before it"),
    "line": (v.HWC2CHW(), np.zeros(3), r"got an array float64 \[3\]"),
    "small": (v.RandomCrop(60), INPUTS["photo"], "60 x 60 of 21 x 29"),
    "outside": (v.Crop((15, 0), 10), INPUTS["photo"], "25 x 10 of 21 x 29"),
    "channels": (v.Normalize([1, 2], [1, 1]), INPUTS["photo"], "got 2 for an array"),
    "gray": (v.RandomColorAdjust(0.4), INPUTS["gray"], r"takes an array \[H, W, 3\]"),
    "floats": (v.Equalize(), INPUTS["floats"], "takes uint8, got an array float32"),
    "picture": (v.ToPIL(), INPUTS["floats"], "put it before ToTensor"),
    "array": (v.RandomGrayscale(1.0), INPUTS["photo"], "takes a Pillow image"),
    "affine": (v.RandomAffine(5), given(INPUTS, "picture"), "got a Pillow image"),
    "erasing": (v.RandomErasing(), INPUTS["gray"], r"takes an array \[C, H, W\]"),
    "cut out": (v.CutOut(60), INPUTS["photo"], "at most the image's sides, 21 x 29"),
    "class": (t.OneHot(2), np.int64(2), "from 0 to 1, got int64"),
    "label": (t.OneHot(2), np.float32(1), "takes an int"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_input_is_named_with_its_cure(name: str) -> None:
    operator, source, text = REFUSED[name]
    with pytest.raises(SampleError, match=text):
        operator(source)


def test_a_damaged_file_is_an_error() -> None:
    for operator in (v.Decode(), v.RandomCropDecodeResize(5)):
        with pytest.raises(ValueError, match="an image file must be"):
            operator(b"no image")


@pytest.mark.parametrize("module", [v, t, C])
def test_a_missing_operator_is_named(module: Any) -> None:
    with pytest.raises(AttributeError, match="has no 'Undulate'"):
        _ = module.Undulate
