"""tf.data: its own operators on photographs and arrays, else generators of Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from .data import BATCH, EPOCH, SIZE, Arrays, Given, Rows, Text, batches_of, rows_of

DCT = "INTEGER_ACCURATE"
AUTO = {"parallel": tf.data.AUTOTUNE, "autotune": True}
SETTINGS: dict[str, Any] = {
    "photographs": {
        "tf.data": [{"parallel": 2}, {"parallel": 3}, {"parallel": 4}, AUTO],
        "tf.data, no antialias": [
            {"parallel": 2, "antialias": False},
            AUTO | {"antialias": False},
        ],
    },
    "tiny": {"tf.data": [{"whole": True}, {"whole": False}]},
    "arrays": {"tf.data": [{"parallel": 1}, {"parallel": 2}]},
    "text": {"tf.data": [{"whole": True}, {"whole": False}]},
    "detection": {"tf.data, ragged": [{}]},
    "waits": {
        "tf.data": [
            {"parallel": 64},
            AUTO,
        ]
    },
}


def decode(data: bytes) -> np.ndarray:
    """Decode a whole JPEG."""
    pixels: np.ndarray = tf.io.decode_jpeg(data, 3, dct_method=DCT).numpy()
    return pixels


def photographs(
    given: Given, *, parallel: int, antialias: bool = True, autotune: bool = False
) -> Iterator[Any]:
    """Yield uint8 [64, 224, 224, 3], and numbers."""

    def crop(path: Any, box: Any, flip: Any, number: Any) -> Any:
        image = tf.io.decode_and_crop_jpeg(
            tf.io.read_file(path), box, channels=3, dct_method=DCT
        )
        image = tf.image.resize(image, (SIZE, SIZE), antialias=antialias)
        image = tf.cast(tf.clip_by_value(tf.round(image), 0, 255), tf.uint8)
        return tf.cond(flip, lambda: image[:, ::-1], lambda: image), number

    numbers = np.arange(len(given.paths))
    columns = (given.paths, np.array(given.boxes, "i4"), given.flips, numbers)
    data = tf.data.Dataset.from_tensor_slices(columns).repeat()
    data = data.map(crop, num_parallel_calls=parallel).batch(BATCH["photographs"])
    return iter(data.prefetch(tf.data.AUTOTUNE if autotune else 2))


def generated(
    rows: Any, signature: Any, batch: Callable[[Any], Any] = lambda data: data
) -> Iterator[Any]:
    """Yield samples from a Python generator."""

    def samples() -> Iterator[Any]:
        return map(rows.__getitem__, range(len(rows)))

    data = tf.data.Dataset.from_generator(samples, output_signature=signature)
    return iter(batch(data).repeat().prefetch(2))


def spec(*shape: int | None, kind: Any = tf.int64) -> Any:
    """Return the specification of a tensor from a generator."""
    return tf.TensorSpec(shape, kind)


def tiny(given: Given, *, whole: bool) -> Iterator[Any]:
    """Yield float32 [256, 32], and labels."""
    size = BATCH["tiny"]
    if whole:
        signature = spec(size, 32, kind=tf.float32), spec(size)
        return generated(batches_of("tiny", given), signature)
    signature = spec(32, kind=tf.float32), spec()
    return generated(rows_of("tiny", given), signature, lambda data: data.batch(size))


def arrays(given: Given, *, parallel: int) -> Iterator[Any]:
    """Yield the same, from the rows of a tensor."""
    rows = Arrays()
    data = tf.data.Dataset.from_tensor_slices((rows.rows, rows.labels)).repeat()
    return iter(data.batch(BATCH["arrays"], num_parallel_calls=parallel).prefetch(2))


def text(given: Given, *, whole: bool) -> Iterator[Any]:
    """Yield int64 [64, longest], a mask and labels."""
    if whole:
        ids = spec(None, None)
        signature = {"ids": ids, "mask": ids, "label": spec(None)}
        return generated(batches_of("text", given), signature)

    def padded(data: Any) -> Any:
        return data.padded_batch(BATCH["text"]).map(
            lambda row: {"ids": row[0], "mask": row[1], "label": row[2]}
        )

    signature = ((spec(None), spec(None), spec()),)
    return generated(Masked(), signature, padded)


class Masked(Rows):
    """Token ids with their mask, in the form that padding needs."""

    def __init__(self) -> None:
        self.text = Text()
        super().__init__(self.text.count)

    def row(self, index: int) -> Any:
        ids, label = self.text[index]
        return ((ids, [1] * len(ids), label),)


def detection(given: Given) -> Iterator[Any]:
    """Yield 16 images, and boxes and labels as ragged tensors: it has no lists."""
    image = spec(3, 96, 96, kind=tf.float32)
    boxes = {"boxes": spec(None, 4, kind=tf.float32), "labels": spec(None)}
    size = BATCH["detection"]
    rows = rows_of("detection", given)
    return generated(rows, (image, boxes), lambda data: data.ragged_batch(size))


def waits(given: Given, *, parallel: int, autotune: bool = False) -> Iterator[Any]:
    """Yield 32 numbers.

    Without a pool of its own, only as many samples can wait at once as there are cores.
    """
    call = partial(
        tf.numpy_function, lambda i: np.int64(given.waits[int(i)]), Tout=tf.int64
    )
    data = tf.data.Dataset.range(EPOCH)
    data = data.map(lambda index: call([index]), num_parallel_calls=parallel)
    options = tf.data.Options()
    options.threading.private_threadpool_size = 64
    return iter(data.batch(BATCH["waits"]).prefetch(2).with_options(options))
