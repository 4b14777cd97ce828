"""One stored sample: self-describing, returned whole and checked or not at all.

    header      48 bytes: magic, version, codec, flags, three lengths, key
    structure   JSON, padded with spaces up to where a body may start
    body        the buffers one after another, packed as one by the codec
    checksum    8 bytes: xxh3_64 of everything before

Integers are little-endian. Nothing is pickled: reading a record only compares and
copies, and calls nothing that the record names. The structure is the sample without
the bytes of its arrays and texts:

    (image, {"label": 3})   is   ["t", ["a", "|B", 224, 224, 3], ["d", "label", 3]]

Plain values stand for themselves. Everything else is a list that starts with a tag.
Offsets of buffers are not stored: buffers follow in the order of the structure.

Smaller records are read sooner, and more of them fit; raw ones cost no CPU. Which
matters more depends on the samples, the room and the cost of computing a sample again.
With `codec="auto"`, one of the first samples decides, for good.
"""

from __future__ import annotations

import json
import logging
import math
import re
import struct
import threading
import timeit
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from xxhash import xxh3_64

from ..errors import SampleError
from .codec import CODECS, Codec, Image, Packed, codec, is_image, predicted, restored

# Largest body, and so the largest allocation that reading a record makes.
MAX_BYTES = 512 << 20

# Largest structure: once read, JSON takes up to some 40 times its size in memory.
MAX_STRUCTURE_BYTES = 8 << 20

KEY_BYTES = 16
MAGIC = b"psrc"
VERSION = 1
HEADER = struct.Struct("<4sBBHQQQ16s")
CHECKSUM = struct.Struct("<Q")
# Bytes hashed at once: from 100 KB on, xxhash releases the GIL.
PIECE = 96 << 10
# Parts larger than this are hashed at once, without the GIL.
KEPT_BYTES = 1 << 21
# A body that does not shrink to this share stays raw, and is read at no cost.
WORTH = 0.97

Node: TypeAlias = "bool | int | float | str | list[Node] | None"
# Where a value is in a sample: (path of its container, index or key there).
Path: TypeAlias = "tuple[Path, Any] | None"

# Bytes; each buffer is aligned to it, for complex128 and vector instructions.
ALIGNMENT = 16

MAX_DEPTH = 64

# Longer texts become buffers, which are packed; the structure is not.
SHORT_TEXT = 64

# An array this small is copied. Otherwise a kept label would keep its whole record.
SMALL_BYTES = 4096

INTS = range(-(2**63), 2**63)
DOUBLE = struct.Struct("<d")

# numpy dtypes that are plain bytes: no objects, no fields that may hold some, and no
# long doubles, as the bytes between their numbers are left by chance.
DTYPE = re.compile(
    r"[<>|](?:[?bBhHiIlLqQefdFD]|[SU]\d{1,9}|[mM]8(?:\[\d{0,9}[A-Za-z]{1,2}\])?)"
)

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
# The tags of values whose bytes become buffers, apart from short texts.
BUFFERED = {kind: tag for tag, kind in (BYTES | TEXT).items()}

CURE = (
    "a cache keeps bytes, text, numbers, bool, None, numpy arrays, dense CPU tensors"
    " without grad, and tuples, lists and dicts of exactly these types; convert it in a"
    " stage before the cache, or put the cache before the stage that makes it"
)


class UnstorableError(SampleError):
    """A cache cannot keep this sample, because it could not return an equal one."""


class Parts:
    """A sample taken apart: its structure as JSON, and its buffers.

    Raises:
        UnstorableError: it would not come back equal, or its structure is too long.
    """

    def __init__(self, sample: Any) -> None:
        # The bytes of each value; those of an image have its shape.
        self.buffers: list[Image] = []
        structure = self._node(sample, None, MAX_DEPTH)
        text = ENCODER.encode(structure).encode("utf-8", "surrogatepass")
        if len(text) > MAX_STRUCTURE_BYTES:
            raise UnstorableError(
                f"sample has a structure of {len(text)} bytes, but a cache keeps at"
                f" most {MAX_STRUCTURE_BYTES}; put numbers into arrays"
            )
        # Padded, so that the body starts aligned.
        self.structure = text.ljust(aligned(HEADER.size + len(text)) - HEADER.size)

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
        is_scalar = isinstance(value, np.generic) and kind is value.dtype.type
        if is_scalar and name_of(value.dtype):
            return self._array("s", np.asarray(value), path)
        raise unstorable(value, path)

    def _plain(self, value: Any) -> Node:
        """Return what JSON expresses exactly, and a tagged list for the rest."""
        kind = type(value)
        if kind in BUFFERED and (kind is not str or len(value) > SHORT_TEXT):
            whole = value[:]  # numpy strips zeros off the end of a scalar's buffer
            if isinstance(whole, str):
                whole = whole.encode("utf-8", "surrogatepass")
            self.buffers.append(np.frombuffer(whole, np.uint8))
            return [BUFFERED[kind], len(whole)]
        if kind is int and value not in INTS:
            return ["i", f"{value:x}"]
        if kind is float and not math.isfinite(value):
            return ["f", DOUBLE.pack(value).hex()]
        return cast("Node", value)

    def _held(self, value: Any, path: Path, depth: int) -> Node:
        if type(value) is not dict:
            return [
                "t" if type(value) is tuple else "l",
                *(self._node(v, (path, i), depth) for i, v in enumerate(value)),
            ]
        for key in value:
            if type(key) not in KEYS:
                raise unstorable(key, path, "a key of the dict that stands there")
        return [
            "d",
            *chain.from_iterable(
                (self._plain(key), self._node(item, (path, key), depth))
                for key, item in value.items()
            ),
        ]

    def _array(self, tag: str, array: np.ndarray[Any, Any], path: Path) -> Node:
        if not (dtype := name_of(array.dtype)):
            raise unstorable(array, path, f"of dtype {array.dtype}")
        flat = np.ascontiguousarray(array).reshape(-1)
        data = flat.view(np.uint8) if array.nbytes else NOTHING
        self.buffers.append(data.reshape(array.shape) if dtype == "|B" else data)
        return [tag, dtype, *array.shape]

    def _tensor(self, tensor: torch.Tensor, path: Path) -> Node:
        if why := unlike_plain(tensor):
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
    name = dtype.str if dtype.kind in "SUmM" else f"{dtype.str[0]}{dtype.char}"
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


def unstorable(value: Any, path: Path, why: str = "") -> UnstorableError:
    """Return the error for a value, with its place in the sample."""
    steps: list[str] = []
    while path is not None:
        path, last = path
        shown = json.dumps(last) if type(last) is str else last
        if type(last) is int and last not in INTS:
            shown = hex(last)  # Python refuses to write long ones as decimals
        steps.append(f"[{shown}]")
    where = "".join(["sample", *reversed(steps)])
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix(
        "builtins."
    )
    text = f"{kind}, {why}" if why else kind
    return UnstorableError(f"{where} is a {text}: {CURE}")


def aligned(offset: int) -> int:
    """Return the next offset, in bytes, at which a buffer may start."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


# What reading a malformed structure may raise.
WRONG = (
    *(ValueError, TypeError, LookupError, OverflowError, RuntimeError, MemoryError),
    struct.error,
)


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
        if not depth or isinstance(node, dict):
            raise ValueError("no structure of a sample")
        if not isinstance(node, list):
            return node
        tag, *rest = node
        if tag in ("t", "l"):
            members = (self._value(member, depth - 1) for member in rest)
            return tuple(members) if tag == "t" else list(members)
        if tag == "d":
            return dict(self._items(rest, depth - 1))
        return self._tagged(tag, *rest)

    def _tagged(self, tag: Node, *rest: Any) -> Any:
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


class RecordError(ValueError):
    """The bytes are not a whole, undamaged, current record of that sample."""


ENCODER = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":")
)


def encode(sample: Any, key: bytes, codec: Codec) -> bytes:
    """Return the record of a sample: see `encode_parts`.

    Raises:
        UnstorableError: the sample, or a named part of it, would not come back equal.
        ValueError: the key is not 16 bytes long.
    """
    return b"".join(encode_parts(sample, key, codec))


def encode_parts(sample: Any, key: bytes, codec: Codec) -> list[bytes | memoryview]:
    """Return the record of a sample, as consecutive parts.

    Parts of a raw record may be the sample's own memory, so nothing is copied before it
    is written. A body that the codec hardly shrinks is stored raw.

    Args:
        sample: anything that a structure can express: see the error's text.
        key: the key it is stored under, 16 bytes.
        codec: packs the body.

    Raises:
        UnstorableError: the sample, or a named part of it, would not come back equal.
        ValueError: the key is not 16 bytes long.
    """
    if len(key) != KEY_BYTES:
        raise ValueError(f"the key has {len(key)} bytes, a record's {KEY_BYTES}")
    parts, number = Parts(sample), codec.number
    body = body_of(parts, codec)
    length = sum(map(len, body))
    if length > MAX_BYTES:
        raise UnstorableError(
            f"sample has {length} bytes, but a cached one may have at most {MAX_BYTES};"
            " put the cache before the stage that makes it this large"
        )
    if number:
        body = [codec.pack(b"".join(body))]
        if len(body[0]) > WORTH * length:
            number, body = 0, body_of(parts, CODECS[0])
    lengths = len(parts.structure), length, sum(map(len, body))
    header = HEADER.pack(MAGIC, VERSION, number, 0, *lengths, key)
    checksum = xxh3_64(header + parts.structure)
    for part in body:
        add_to(checksum, part)
    return [header, parts.structure, *body, CHECKSUM.pack(checksum.intdigest())]


def decode(record: Packed, key: bytes) -> Any:
    """Return the sample of a record.

    Arrays and tensors are contiguous, writable, and share memory with nobody else.

    Args:
        record: a writable one is assumed to be a copy made for this call. Large arrays
            of a raw record are then views of it, which saves a copy.
        key: the key it is stored under.

    Raises:
        RecordError: it is not a whole, undamaged, current record of that key.
    """
    codec, text, stored_body, body_bytes = check(record, key)
    try:
        structure = json.loads(str(text, "utf-8", "surrogatepass"))
        body = memoryview(codec.unpack(stored_body, body_bytes))
        is_ours = not body.readonly and (
            codec.number > 0  # unpacked into memory where any array may start
            or np.asarray(body).__array_interface__["data"][0] % ALIGNMENT == 0
        )
        return Reader(body, is_ours, codec.predicts).read(structure)
    except WRONG as error:
        raise RecordError(f"a record's content is wrong: {error}") from error


def same(one: Any, other: Any) -> bool:
    """Whether two samples would come back identical: types, bytes and all.

    Raises:
        UnstorableError: one of them cannot be stored.
    """
    first, second = Parts(one), Parts(other)
    return first.structure == second.structure and all(
        map(np.array_equal, first.buffers, second.buffers)
    )


def body_of(parts: Parts, codec: Codec) -> list[bytes | memoryview]:
    """Return the body before it is packed: each buffer, and what aligns it."""
    body: list[bytes | memoryview] = []
    length = 0
    for buffer in parts.buffers:
        is_predicted = codec.predicts and is_image(buffer.shape)
        data = predicted(buffer) if is_predicted else buffer.reshape(-1)
        body += [bytes(-length % ALIGNMENT), data.data]
        length = aligned(length) + buffer.size
    return body


def check(record: Packed, key: bytes) -> tuple[Codec, memoryview, memoryview, int]:
    """Check the header, lengths and checksum of a record.

    Returns:
        its codec, its structure, its body, and the size of the body unpacked.

    Raises:
        RecordError: it is not a whole, undamaged, current record of that key.
    """
    view = memoryview(record)
    if len(view) < HEADER.size + CHECKSUM.size:
        raise RecordError(f"{len(view)} bytes are too few for a record")
    magic, version, number, flags, *lengths, its_key = HEADER.unpack_from(view)
    if magic != MAGIC or version != VERSION:
        raise RecordError(
            f"a record of kind {magic!r} {version}, not {MAGIC!r} {VERSION}: written"
            " by another version of penstock, or by another program; clear the cache"
        )
    end = len(view) - CHECKSUM.size
    checksum = xxh3_64()
    add_to(checksum, view[:end])
    if CHECKSUM.unpack_from(view, end)[0] != checksum.intdigest():
        raise RecordError(f"a record of {len(view)} bytes is damaged; delete it")
    if its_key != key:
        raise RecordError(
            f"a record of key {its_key.hex()} stands under {key.hex()}; delete it"
        )
    structure, body, stored_bytes = lengths
    if flags or number not in CODECS or HEADER.size + structure + stored_bytes != end:
        raise RecordError(f"a record's header is wrong: {number=} {flags=} {lengths=}")
    if structure > MAX_STRUCTURE_BYTES + ALIGNMENT or body > MAX_BYTES:
        raise RecordError(f"a record of {lengths} bytes is too large to be one of ours")
    start = HEADER.size + structure
    return CODECS[number], view[HEADER.size : start], view[start:end], body


def add_to(checksum: xxh3_64, part: bytes | memoryview) -> None:
    """Add bytes to a checksum.

    Parts of up to `KEPT_BYTES` are hashed in pieces for which xxhash keeps the GIL.
    When other threads want it, too, getting it back takes longer than hashing them.
    """
    if not PIECE < len(part) <= KEPT_BYTES:
        checksum.update(part)
        return
    view = memoryview(part)
    for start in range(0, len(view), PIECE):
        checksum.update(view[start : start + PIECE])


# The number of the sample that decides; caches are warm by then.
DECIDES = 3
# All samples fit if the room is this many times what that one suggests.
ROOMY = 1.5
# Repetitions of each measurement; the best counts, as others may use the CPU.
TRIES = 3
# Costs this close, relatively, are equal: one sample cannot separate them.
TIE = 0.03
NO_KEY = bytes(KEY_BYTES)


class Picker:
    """Encodes samples. Safe in any thread.

    Args:
        name: a codec's name, or "auto".
        owner: the name of the cache in the log.
        samples: number of samples in an epoch.
        capacity_bytes: bytes that the tier may hold.
    """

    def __init__(
        self, name: str, owner: str, samples: int, capacity_bytes: float
    ) -> None:
        self._owner, self._samples = owner, samples
        self._capacity_bytes = capacity_bytes
        # Held while one sample decides, so that others do not measure beside it.
        self._lock = threading.Lock()
        self._count = 0  # of samples so far
        self._codec: Codec | None = None if name == "auto" else codec(name)

    def encoded(
        self, sample: Any, key: bytes, took_ns: int
    ) -> list[bytes | memoryview]:
        """Return a sample's record in parts.

        Raises:
            UnstorableError: the sample cannot be stored.
        """
        record = encode_parts(sample, key, self._codec or CODECS[0])
        if self._codec is None:
            with self._lock:
                self._count += 1
                if self._count == DECIDES:
                    self._codec = self._choice(sample, sum(map(len, record)), took_ns)
        return record

    def expected_ns(self, nbytes: int, unpack_ns: float, compute_ns: float) -> float:
        """Return what a sample is expected to take in later epochs, in nanoseconds.

        A full tier that keeps its content and admits no more has a hit rate in
        proportion to what fits, in whatever order (MinIO of CoorDL, J. Mohan et al.,
        VLDB 2021).

        Args:
            nbytes: bytes of its record.
            unpack_ns: time that a hit takes.
            compute_ns: time that computing it takes, which a hit saves.
        """
        hit = min(1.0, self._capacity_bytes / (self._samples * nbytes))
        return hit * unpack_ns + (1 - hit) * compute_ns

    def _choice(self, sample: Any, raw_bytes: int, compute_ns: int) -> Codec:
        """Return the codec with the lowest expected time; of equals, the simplest."""
        if ROOMY * raw_bytes * self._samples <= self._capacity_bytes:
            return CODECS[0]  # all fit as they are
        costs = {}
        for candidate in CODECS.values():
            record = encode(sample, NO_KEY, candidate)
            # A tier returns writable copies.
            unpack = partial(decode, bytearray(record), NO_KEY)
            unpack_ns = 1e9 * min(timeit.repeat(unpack, repeat=TRIES, number=1))
            costs[candidate] = self.expected_ns(len(record), unpack_ns, compute_ns)
        least_ns = (1 + TIE) * min(costs.values())
        choice = next(candidate for candidate, ns in costs.items() if ns <= least_ns)
        logging.getLogger("penstock").info(
            '%s: codec "%s"; expected per sample: %s',
            self._owner,
            choice.name,
            ", ".join(f"{it.name} {ns / 1e6:.3f} ms" for it, ns in costs.items()),
        )
        return choice
