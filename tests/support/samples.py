"""Random samples, of every kind that a dataset may yield."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

__all__ = ["OTHER_PAIR", "PAIR", "assert_same", "makers"]

Maker = Callable[[np.random.Generator], Any]
"""Makes one sample after another, alike but for the values."""

PAIR = namedtuple("PAIR", "image label")  # noqa: PYI024 samples may be of any type
OTHER_PAIR = namedtuple("OTHER_PAIR", "image label")  # noqa: PYI024 as above

NUMPY_DTYPES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64"),
    *("int64", "float16", "float32", "float64", "complex64", "complex128"),
)
STRANGE_DTYPES = (">f4", ">i8", "U3", "M8[s]", "object")
TORCH_DTYPES = (
    *(torch.bool, torch.uint8, torch.int16, torch.int64, torch.uint16),
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64),
)
SHAPES = st.sampled_from([(), (0,), (1,), (3,), (2, 3), (3, 0, 2), (2, 1, 3), (5, 0)])


def array(dtype: str, shape: tuple[int, ...], layout: str) -> Maker:
    """Return a maker of arrays, laid out in memory in one of several ways."""

    def make(rng: np.random.Generator) -> Any:
        full = rng.integers(0, 100, tuple(2 * n for n in shape)).astype(dtype)
        if layout == "strided":
            return full[tuple(slice(None, None, 2) for _ in shape)]
        part = full[tuple(slice(n) for n in shape)]
        return np.array(part, order="F" if layout == "fortran" else "C")

    return make


def tensor(dtype: torch.dtype, shape: tuple[int, ...], how: str) -> Maker:
    """Return a maker of tensors: plain, strided, or part of a graph."""

    def make(rng: np.random.Generator) -> Any:
        full = torch.from_numpy(rng.integers(0, 100, tuple(2 * n for n in shape)))
        full = full.to(dtype)
        part = full[tuple(slice(None, None, 2) for _ in shape)]
        if how == "strided":
            return part
        differentiable = dtype.is_floating_point or dtype.is_complex
        return part.clone().requires_grad_(how == "graph" and differentiable)

    return make


def mixed(first: Maker, second: Maker) -> Maker:
    """Return a maker that makes now one kind, now the other."""
    return lambda rng: (second if rng.random() < 0.3 else first)(rng)


def members(parts: list[Maker]) -> Callable[[np.random.Generator], list[Any]]:
    """Return a maker of lists."""
    return lambda rng: [part(rng) for part in parts]


def sequence(kind: str, parts: list[Maker]) -> Maker:
    """Return a maker of tuples, lists or namedtuples."""
    maker = members(parts)
    if kind == "pair" and len(parts) == 2:
        return lambda rng: PAIR(*maker(rng))
    if kind == "other pair" and len(parts) == 2:
        return lambda rng: OTHER_PAIR(*maker(rng))
    return maker if kind == "list" else lambda rng: tuple(maker(rng))


def mapping(parts: list[Maker], *, turning: bool) -> Maker:
    """Return a maker of dicts; `turning`: their keys come in any order."""

    def make(rng: np.random.Generator) -> Any:
        items = [(f"key {at}", part(rng)) for at, part in enumerate(parts)]
        return dict(reversed(items)) if turning and rng.random() < 0.5 else dict(items)

    return make


def text(rng: np.random.Generator) -> str:
    """Make a short text."""
    return "abc"[: rng.integers(0, 4)]


NUMBERS: list[Maker] = [
    lambda rng: int(rng.integers(-(2**63), 2**63 - 1)),
    lambda rng: int(rng.integers(0, 9)) + 2**63 * bool(rng.random() < 0.1),
    lambda rng: float(rng.standard_normal()),
    lambda rng: float(rng.choice([np.nan, np.inf, -0.0, 1e300])),
    lambda rng: bool(rng.random() < 0.5),
    lambda rng: np.float32(rng.random()),
    lambda rng: np.int16(rng.integers(0, 9)),
    lambda rng: np.bool_(rng.random() < 0.5),
    lambda rng: np.float64(rng.random()),
    lambda rng: np.int64(rng.integers(0, 9)),
    lambda rng: np.uint64(rng.integers(0, 9)),
    lambda rng: np.float16(rng.random()),
    lambda rng: np.complex64(rng.random()),
]
TEXTS: list[Maker] = [text, lambda rng: text(rng).encode()]
NO_SAMPLES: list[Maker] = [lambda rng: None, lambda rng: 1j, lambda rng: {1, 2}]

ARRAYS = st.builds(
    array,
    st.sampled_from(NUMPY_DTYPES),
    SHAPES,
    st.sampled_from(["plain", "plain", "strided", "fortran"]),
)
STRANGE_ARRAYS = st.builds(
    array, st.sampled_from(STRANGE_DTYPES), SHAPES, st.just("plain")
)
TENSORS = st.builds(
    tensor,
    st.sampled_from(TORCH_DTYPES),
    SHAPES,
    st.sampled_from(["plain", "plain", "strided", "graph"]),
)


def makers() -> st.SearchStrategy[Maker]:
    """Return a strategy of makers of samples, mostly of ones that can be collated."""
    leaves = st.one_of(
        *(ARRAYS, ARRAYS, TENSORS, STRANGE_ARRAYS),
        *(st.sampled_from(NUMBERS), st.sampled_from(NUMBERS)),
        *(st.sampled_from(TEXTS), st.sampled_from(NO_SAMPLES)),
    )
    return st.recursive(leaves, grown, max_leaves=6)


def grown(inner: st.SearchStrategy[Maker]) -> st.SearchStrategy[Maker]:
    """Return containers of, and mixtures of, what `inner` makes."""
    parts = st.lists(inner, max_size=3)
    kinds = st.sampled_from(["tuple", "list", "pair", "other pair"])
    plain = st.one_of(
        st.builds(sequence, kinds, parts),
        st.builds(sequence, kinds, st.lists(inner, min_size=2, max_size=2)),
        st.builds(mapping, parts, turning=st.booleans()),
    )
    mixture = st.builds(mixed, inner, inner)
    return st.one_of(plain, plain, plain, mixture)


def assert_same(ours: Any, theirs: Any) -> None:
    """Compare two batches: types of containers, order of keys, dtypes, bytes."""
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert ours.requires_grad == theirs.requires_grad
        assert raw(ours) == raw(theirs)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key, part in theirs.items():
            assert_same(ours[key], part)
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    elif isinstance(theirs, np.ndarray):
        assert ours.dtype == theirs.dtype
        assert np.array_equal(ours, theirs)
    else:
        assert repr(ours) == repr(theirs)  # NaN is like NaN


def raw(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor, in the order of its elements."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    # Not by contiguous(): to that a lone element is in order, whatever its stride.
    copy = tensor.detach().resolve_conj().clone(memory_format=torch.contiguous_format)
    flat = copy.reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
