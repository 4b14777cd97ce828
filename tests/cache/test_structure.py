"""A sample comes back exactly; what cannot be stored is named with its place."""

import struct
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image

from penstock.cache.codec import CODECS
from penstock.cache.record import (
    TENSOR_DTYPES,
    WRONG,
    Reader,
    UnstorableError,
    decode,
    encode,
    same,
)

KEY = bytes(range(16))

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")

texts = st.text(st.characters(exclude_categories=()), max_size=100)
keys = st.none() | st.booleans() | st.integers() | st.floats() | texts
dtypes = (
    arrays.scalar_dtypes()
    | arrays.unicode_string_dtypes(endianness="?", max_len=5)
    | arrays.byte_string_dtypes(endianness="?", max_len=5)
)
shapes = arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
images = st.sampled_from([(20, 20, 3), (3, 20, 20), (40, 40), (2, 20, 20, 4)])


@st.composite
def ndarrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    if draw(st.booleans()):
        return draw(arrays.arrays(np.uint8, images))
    array = draw(arrays.arrays(draw(dtypes), draw(shapes)))
    return array.T if draw(st.booleans()) else array


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(list(TENSOR_DTYPES.values())))
    shape = draw(shapes)
    length = int(np.prod(shape)) * dtype.itemsize
    data = bytearray(draw(st.binary(min_size=length, max_size=length)))
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(shape)


leaves = (
    st.binary(max_size=100)
    | keys
    | ndarrays()
    | tensors()
    | arrays.arrays(np.uint8, images).map(torch.from_numpy)
    | dtypes.flatmap(lambda d: arrays.arrays(d, ())).map(lambda array: array[()])
)
samples = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=8,
)


def anatomy(value: Any) -> object:
    """Return everything about a value, including what `==` does not compare."""
    kind = type(value)
    if kind in (tuple, list):
        return kind, [anatomy(item) for item in value]
    if kind is dict:
        return kind, [(anatomy(k), anatomy(v)) for k, v in value.items()]
    return kind, *parts(value)


def parts(value: Any) -> tuple[object, ...]:
    """Return everything but the type of a value that holds no others."""
    if type(value) is float:
        return (struct.pack("<d", value),)
    if isinstance(value, np.str_ | np.bytes_):
        return tuple(value)  # numpy's `==` ignores zeros at the end
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.str, value.dtype.char, value.shape, value.tobytes()
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, bytes_of(value)
    return (value,)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes."""
    flat = tensor.resolve_conj().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def buffers(value: Any) -> list[np.ndarray[Any, Any]]:
    """Return the arrays of a sample, and its tensors as arrays."""
    if isinstance(value, tuple | list):
        return [buffer for item in value for buffer in buffers(item)]
    if isinstance(value, dict):
        return buffers(list(value.values()))
    if isinstance(value, torch.Tensor):
        assert value.is_contiguous()
        flat = value.reshape(-1)
        return [flat.view(torch.uint8).numpy()] if flat.numel() else []
    return [value] if isinstance(value, np.ndarray) else []


@given(samples, st.sampled_from(list(CODECS.values())), st.booleans())
def test_a_sample_comes_back_exactly(
    sample: Any,
    codec: Any,
    is_copy: bool,  # noqa: FBT001 - drawn
) -> None:
    record = encode(sample, KEY, codec)
    again = decode(bytearray(record) if is_copy else record, KEY)
    assert anatomy(again) == anatomy(sample)
    assert same(again, sample)


@given(samples, st.sampled_from(list(CODECS.values())), st.booleans())
def test_arrays_come_back_in_memory_of_their_own(
    sample: Any,
    codec: Any,
    is_copy: bool,  # noqa: FBT001 - drawn
) -> None:
    record = encode(sample, KEY, codec)
    own_arrays = buffers(decode(bytearray(record) if is_copy else record, KEY))
    original = anatomy(sample)
    for array in own_arrays:
        assert array.flags.writeable
        assert array.flags.c_contiguous
        assert array.flags.aligned
    for number, array in enumerate(own_arrays):
        if array.nbytes:
            array.reshape(-1).view(np.uint8)[:] = number
    assert all(
        bool(np.all(array.reshape(-1).view(np.uint8) == number))
        for number, array in enumerate(own_arrays)
        if array.nbytes
    )
    assert anatomy(sample) == original
    assert anatomy(decode(record, KEY)) == original


def test_only_a_large_array_is_a_view_of_the_copy_it_is_read_from() -> None:
    sample = (np.zeros((64, 64, 3), np.uint8), np.zeros(3))
    record = bytearray(encode(sample, KEY, CODECS[0]))
    whole = np.frombuffer(record, np.uint8)
    large, small = decode(record, KEY)
    assert np.shares_memory(large, whole)
    assert not np.shares_memory(small, whole)


def test_a_copy_that_is_not_aligned_is_copied_once_more() -> None:
    sample = torch.arange(2000.0)
    record = bytearray(b"x" + encode(sample, KEY, CODECS[0]))
    del record[:1]
    again = decode(record, KEY)
    assert again.data_ptr() % 16 == 0
    assert torch.equal(again, sample)


@pytest.mark.parametrize(
    "value",
    [
        np.longlong(5),
        np.datetime64("2020-01-01T00:00", "25s"),
        np.timedelta64("NaT", "s"),
        np.str_("ends in zeros\0\0"),
        np.bytes_(b"\0\0"),
        np.zeros((2, 0, 3), "S0"),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(5, dtype=">i4")[::-2],
        np.broadcast_to(np.float32(3), (4, 5)),
        torch.view_as_complex(torch.randn(3, 2)).conj(),
        torch.arange(6).reshape(2, 3).T,
        10**5000,
        -(2**63) - 1,
        struct.unpack("<d", bytes.fromhex("010000000000f8ff"))[0],
        "\ud83d\ude00",
        {1: "one", "1": "text", 1.5: None, None: True},
    ],
    ids=lambda value: type(value).__name__,
)
def test_rare_values_come_back_exactly(value: Any) -> None:
    again = decode(encode(value, KEY, CODECS[0]), KEY)
    assert anatomy(again) == anatomy(value)


def test_a_frozen_array_comes_back_writable() -> None:
    frozen = np.arange(3)
    frozen.flags.writeable = False
    assert decode(encode(frozen, KEY, CODECS[0]), KEY).flags.writeable


class Colour(IntEnum):
    RED = 1


class Matrix(np.ndarray[Any, Any]):
    pass


Pair = namedtuple("Pair", "left right")  # noqa: PYI024 - what datasets yield


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Pair(1, 2), "test_structure.Pair"),
        (Colour.RED, "test_structure.Colour"),
        (OrderedDict(a=1), "collections.OrderedDict"),
        (np.zeros(3).view(Matrix), "test_structure.Matrix"),
        (np.ma.masked_array([1.0]), "MaskedArray"),
        (np.array([None]), "numpy.ndarray, of dtype object"),
        (np.zeros(2, "i4,f4"), "numpy.ndarray, of dtype [('f0', '<i4')"),
        (np.zeros(2, "V3"), "numpy.ndarray, of dtype |V3"),
        (np.void(b"abc"), "numpy.void"),
        (np.zeros(2, np.longdouble), f"of dtype {np.dtype(np.longdouble)}"),
        (np.clongdouble(1), "numpy.clongdouble"),
        (torch.nn.Parameter(torch.zeros(1)), "torch.nn.parameter.Parameter"),
        (torch.zeros(1, requires_grad=True), "torch.Tensor, that requires grad"),
        (torch.zeros(2, device="meta"), "torch.Tensor, on meta"),
        (torch.eye(2).to_sparse(), "torch.Tensor, of layout torch.sparse_coo"),
        (bytearray(b"abc"), "bytearray"),
        ({1, 2}, "set"),
        (1j, "complex"),
        (len, "builtin_function_or_method"),
        (SimpleNamespace(), "types.SimpleNamespace"),
        (Image.new("RGB", (2, 2)), "PIL.Image.Image"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_value_that_cannot_be_stored_is_named_with_its_place(
    value: Any, name: str
) -> None:
    with pytest.raises(UnstorableError) as caught:
        encode((1, {"mask": [0, {None: value}]}), KEY, CODECS[0])
    text = str(caught.value)
    assert text.startswith('sample[1]["mask"][1][None] is a ')
    assert f"{name}" in text.partition(": a cache")[0]
    assert text.endswith("put the cache before the stage that makes it")


def test_a_key_that_cannot_be_stored_is_named_with_its_dict() -> None:
    with pytest.raises(
        UnstorableError, match=r"sample\[0\] is a tuple, a key of the dict that"
    ):
        encode([{(1, 2): 3}], KEY, CODECS[0])


def test_a_key_may_be_a_number_too_long_to_print() -> None:
    with pytest.raises(UnstorableError, match=r"sample\[0x1000*\] is a complex"):
        encode({16**5000: 1j}, KEY, CODECS[0])


def test_a_sample_that_holds_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UnstorableError, match="nested more than 64 deep"):
        encode(endless, KEY, CODECS[0])


def nested(depth: int) -> Any:
    """Return a number nested in `depth` lists."""
    value: Any = [np.arange(3)]
    for _ in range(depth - 1):
        value = [value]
    return value


def test_the_deepest_sample_that_can_be_stored_can_be_read() -> None:
    again = decode(encode(nested(64), KEY, CODECS[0]), KEY)
    assert anatomy(again) == anatomy(nested(64))
    with pytest.raises(UnstorableError):
        encode(nested(65), KEY, CODECS[0])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ((1,), [1]),
        (np.arange(3), np.arange(3, dtype=np.int32)),
        (np.arange(3), np.arange(1, 4)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (b"ab", b"abc"),
    ],
)
def test_samples_that_differ_are_not_the_same(one: Any, other: Any) -> None:
    assert same(one, one)
    assert not same(one, other)


@pytest.mark.parametrize(
    "structure",
    [
        {},
        [],
        ["?"],
        [1, 2],
        [["t"]],
        ["a"],
        ["a", "|O", 1],
        ["a", "<V8", 1],
        ["a", "i4,f4", 1],
        ["a", "(2,3)<f4"],
        ["a", "<U999999999", 3],
        ["a", "|B", -1],
        ["a", "|B", True],
        ["a", "|B", 1.0],
        ["a", "|B", 10**100],
        ["a", "|B", "3"],
        ["a", "|B", 0, *[2**62] * 3],
        ["a", "|B", *[1] * 65],
        ["a", "|B", *[10**100] * 10_000],
        ["a", ["|B"], 32],
        ["p", "qint8", 32],
        ["p", "load", 32],
        ["p", "uint8", 0, 2**62, 2**62],
        ["p", "float32", 10**9],
        ["s", "|B", 32],
        ["b"],
        ["b", 33],
        ["b", -1],
        ["b", None],
        ["b", 1, 2],
        ["u", 32],
        ["i", "no number"],
        ["i", 5],
        ["f", "00"],
        ["d", "key"],
        ["d", ["t"], 1],
        ["d", ["a", "|B", 1], 1],
        ["d", ["l"], 1],
        ["t", ["b", 32], ["b", 1]],
        ["t", ["b", 16]],
        1,
    ],
    ids=lambda structure: str(structure)[:30],
)
def test_a_structure_that_is_wrong_is_refused(structure: Any) -> None:
    body = memoryview(b"\xff" * 32)
    for predicts in (False, True):
        with pytest.raises(WRONG):
            Reader(body, is_ours=False, predicts=predicts).read(structure)


def deep(wrap: Callable[[Any], Any]) -> Any:
    structure: Any = None
    for _ in range(100):
        structure = wrap(structure)
    return structure


@pytest.mark.parametrize("wrap", [lambda s: ["t", s], lambda s: ["d", "a", s]])
def test_a_structure_that_is_too_deep_is_refused(wrap: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match="no structure"):
        Reader(memoryview(b""), is_ours=False, predicts=False).read(deep(wrap))
