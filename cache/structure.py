"""A sample taken apart: a structure, which is JSON, and its buffers, which are bytes.

Nothing in either can call anything: reading them only compares and copies.

    (image, {"label": 3})   is   ["t", ["a", "|B", 224, 224, 3], ["d", "label", 3]]

Plain values stand for themselves. Everything else is a list that starts with a tag.
Offsets of buffers are not stored: buffers follow in the order of the structure.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import SampleError
from .codec import is_image, restored

Node: TypeAlias = "bool | int | float | str | list[Node] | None"
Path: TypeAlias = "tuple[Path, Any] | None"
"""Where a value is in a sample: (path of its container, index or key there)."""

ALIGNMENT = 16
"""Bytes; each buffer is aligned to it, for complex128 and vector instructions."""

MAX_DEPTH = 64

SHORT_TEXT = 64
"""Longer texts become buffers, which are packed; the structure is not."""

SMALL_BYTES = 4096
"""An array this small is copied. Otherwise a kept label would keep its whole record."""

INTS = range(-(2**63), 2**63)
DOUBLE = struct.Struct("<d")

DTYPE = re.compile(
    r"[<>|](?:[?bBhHiIlLqQefdgFDG]|[SU]\d{1,9}|[mM]8(?:\[\d{0,9}[A-Za-z]{1,2}\])?)"
)
"""numpy dtypes that are plain bytes: no objects, and no fields that may hold some."""

TENSOR_DTYPES = {
    name: dtype
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64"),
        *("int8", "int16", "int32", "int64", "bfloat16", "float16", "float32"),
        *("float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
        *("float8_e8m0fnu", "float4_e2m1fn_x2"),
    )
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
TENSOR_NAMES = {dtype: name for name, dtype in TENSOR_DTYPES.items()}

BYTES: dict[str, type[bytes]] = {"b": bytes, "B": np.bytes_}
TEXT: dict[str, type[str]] = {"u": str, "U": np.str_}
BUFFERED = {kind: tag for tag, kind in (BYTES | TEXT).items()}
"""The tags of values whose bytes become buffers, apart from short texts."""

CURE = (
    "a cache keeps bytes, text, numbers, bool, None, numpy arrays, dense CPU tensors"
    " without grad, and tuples, lists and dicts of exactly these types; convert it in a"
    " stage before the cache, or put the cache before the stage that makes it"
)


class UnstorableError(SampleError):
    """A cache cannot keep this sample, because it could not return an equal one."""


@dataclass(slots=True)
class TakenBytes:
    """Takes a sample apart.

    Raises:
        UnstorableError: it would not come back equal.
    """

    sample: Any
    structure: Node = None
    buffers: list[NDArray[np.uint8]] = field(default_factory=list)
    """The bytes of each value; those of an image have its shape, others are flat."""

    def __post_init__(self) -> None:
        self.structure = self._node(self.sample, None, MAX_DEPTH)

    def _node(self, value: Any, path: Path, depth: int) -> Node:
        kind = type(value)
        if kind in PLAIN:
            return self._plain(value)
        if kind in (tuple, list, dict):
            if not depth:
                raise unstorable(value, path, f"nested more than {MAX_DEPTH} deep")
            return self._held(value, path, depth - 1)
        if kind is np.ndarray:
            return self._array("a", value, path)
        if kind is torch.Tensor:
            return self._tensor(value, path)
        if isinstance(value, np.generic) and kind is value.dtype.type:
            if not name_of(value.dtype):
                raise unstorable(value, path)
            return self._array("s", np.asarray(value), path)
        raise unstorable(value, path)

    def _plain(self, value: Any) -> Node:
        """Return what JSON expresses exactly, and a tagged list for the rest."""
        kind = type(value)
        if kind in BUFFERED and (kind is not str or len(value) > SHORT_TEXT):
            whole = value[:]  # numpy strips zeros off the end of a scalar's buffer
            is_bytes = isinstance(whole, bytes)
            data = whole if is_bytes else whole.encode("utf-8", "surrogatepass")
            self.buffers.append(np.frombuffer(data, np.uint8))
            return [BUFFERED[kind], len(data)]
        if kind is int and value not in INTS:
            return ["i", f"{value:x}"]
        if kind is float and not math.isfinite(value):
            return ["f", DOUBLE.pack(value).hex()]
        plain: Node = value
        return plain

    def _held(self, value: Any, path: Path, depth: int) -> Node:
        if type(value) is not dict:
            tag = "t" if type(value) is tuple else "l"
            each = enumerate(value)
            return [tag, *(self._node(v, (path, i), depth) for i, v in each)]
        for key in value:
            if type(key) not in KEYS:
                raise unstorable(key, path, "a key of the dict that stands there")
        items = (
            (self._plain(key), self._node(item, (path, key), depth))
            for key, item in value.items()
        )
        return ["d", *chain.from_iterable(items)]

    def _array(self, tag: str, array: np.ndarray[Any, Any], path: Path) -> Node:
        dtype = name_of(array.dtype)
        if not dtype:
            raise unstorable(array, path, f"of dtype {array.dtype}")
        flat = np.ascontiguousarray(array).reshape(-1)
        data = flat.view(np.uint8) if array.nbytes else NOTHING
        self.buffers.append(data.reshape(array.shape) if dtype == "|B" else data)
        return [tag, dtype, *array.shape]

    def _tensor(self, tensor: torch.Tensor, path: Path) -> Node:
        why = unlike_plain(tensor)
        if why:
            raise unstorable(tensor, path, why)
        whole = tensor.resolve_conj().resolve_neg().contiguous()
        data = whole.reshape(-1).view(torch.uint8).numpy() if whole.numel() else NOTHING
        is_bytes = tensor.dtype == torch.uint8
        self.buffers.append(data.reshape(tensor.shape) if is_bytes else data)
        return ["p", TENSOR_NAMES[tensor.dtype], *tensor.shape]


NOTHING = np.empty(0, np.uint8)
KEYS = {str, int, float, bool, type(None)}
PLAIN = KEYS | BUFFERED.keys()


def name_of(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype in a record; empty if a record cannot hold it."""
    # Letters distinguish long from long long, but leave out the size of text and times.
    is_letter = dtype.kind not in "SUmM"
    name = f"{dtype.str[0]}{dtype.char}" if is_letter else dtype.str
    return name if DTYPE.fullmatch(name) else ""


def unlike_plain(tensor: torch.Tensor) -> str:
    """Return what a record would lose of a tensor; empty if nothing."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        return f"of layout {tensor.layout}, not plain and dense"
    if tensor.device.type != "cpu":
        return f"on {tensor.device}"
    if tensor.requires_grad:
        return "that requires grad"
    if tensor.dtype not in TENSOR_NAMES:
        return f"of dtype {tensor.dtype}"
    return "with names" if any(getattr(tensor, "names", ())) else ""


def step(key: Any) -> str:
    """Return the step from a container to the value under a key or index, as code."""
    if type(key) is int and key not in INTS:
        return f"[{key:#x}]"  # Python refuses to write long ones as decimals
    return f"[{json.dumps(key)}]" if type(key) is str else f"[{key}]"


def unstorable(value: Any, path: Path, why: str = "") -> UnstorableError:
    """Return the error for a value, with its place in the sample."""
    steps: list[str] = []
    while path is not None:
        path, last = path
        steps.append(step(last))
    where = "".join(["sample", *reversed(steps)])
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    kind = kind.removeprefix("builtins.")
    described = f"{kind}, {why}" if why else kind
    return UnstorableError(f"{where} is a {described}: {CURE}")


def aligned(offset: int) -> int:
    """Return the next offset, in bytes, at which a buffer may start."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


WRONG = (
    *(ValueError, TypeError, LookupError, OverflowError, RuntimeError, MemoryError),
    struct.error,
)
"""What reading a malformed structure may raise."""


@dataclass(slots=True)
class Reader:
    """Rebuilds a sample from its structure and the body of its buffers.

    Malformed input raises one of `WRONG`. It allocates no more memory than the body has
    bytes, and no more objects than the structure has characters.
    """

    body: memoryview
    is_ours: bool
    """Whether arrays may be views of the body."""
    predicts: bool
    _at: int = 0

    def read(self, structure: Node) -> Any:
        """Return the sample.

        Raises:
            Exception: one of `WRONG`, if structure and body do not make a sample.
        """
        sample = self._value(structure, MAX_DEPTH + 1)
        if self._at != len(self.body):
            raise ValueError(f"{len(self.body)} bytes of buffers, {self._at} used")
        return sample

    def _value(self, node: Node, depth: int) -> Any:
        if not isinstance(node, list):
            if isinstance(node, dict) or not depth:
                raise ValueError("no structure of a sample")
            return node
        tag, *rest = node
        if not depth or not isinstance(tag, str):
            raise ValueError("no structure of a sample")
        if tag in ("t", "l"):
            held = (self._value(each, depth - 1) for each in rest)
            return tuple(held) if tag == "t" else list(held)
        if tag == "d":
            return dict(self._items(rest, depth - 1))
        return self._tagged(tag, *rest)

    def _tagged(self, tag: str, *rest: Any) -> Any:
        match tag:
            case "a" | "s":
                array = self._array(*rest)
                return array.reshape(())[()] if tag == "s" else array
            case "p":
                return self._tensor(*rest)
            case "b" | "B":
                return BYTES[tag](bytes(self._take(*rest)))
            case "u" | "U":
                return TEXT[tag](str(self._take(*rest), "utf-8", "surrogatepass"))
            case "i":
                return int(rest[0], 16)
            case "f":
                return DOUBLE.unpack(bytes.fromhex(rest[0]))[0]
        raise ValueError(f"{tag!r} is no tag of a structure")

    def _items(self, rest: list[Node], depth: int) -> Iterator[tuple[Any, Any]]:
        for key, item in zip(rest[::2], rest[1::2], strict=True):
            name = self._value(key, 1)
            if type(name) not in KEYS:
                raise TypeError(f"{type(name)} as a key")
            yield name, self._value(item, depth)

    def _take(self, length: int) -> memoryview:
        start = aligned(self._at)
        if type(length) is not int or not 0 <= length <= len(self.body) - start:
            raise ValueError(f"no buffer of {length} bytes at {start}")
        self._at = start + length
        return self.body[start : self._at]

    def _array(self, name: str, *shape: int) -> np.ndarray[Any, Any]:
        if not DTYPE.fullmatch(name):
            raise TypeError(f"{name!r} is no dtype of a record")
        dtype = np.dtype(name)
        data = self._take(count(shape) * dtype.itemsize)
        if self.predicts and name == "|B" and is_image(shape):
            return restored(np.frombuffer(data, np.uint8), shape)
        # In memory that nobody else changes.
        is_view = self.is_ours and len(data) > SMALL_BYTES
        return np.ndarray(shape, dtype, data if is_view else bytearray(data))

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        dtype = TENSOR_DTYPES[name]
        if dtype == torch.uint8:
            return torch.from_numpy(self._array("|B", *shape))
        data = self._array("|B", count(shape) * dtype.itemsize)
        return torch.from_numpy(data).view(dtype).reshape(shape)


def count(shape: tuple[int, ...]) -> int:
    """Return the number of elements of an array of this shape.

    Raises:
        ValueError: it is not a shape.
    """
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{shape!r} is no shape")
    return math.prod(shape)
