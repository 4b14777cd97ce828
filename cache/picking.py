"""Which codec records are written with: as said, or found out on the first samples."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from typing import Any

from .codec import CODECS, Codec, Facts, choose, codec
from .record import describe, encode, encode_parts, measure

__all__ = ["Picker"]

LOGGER = logging.getLogger("penstock.autotune")
SAMPLES = 3
"""That are measured; those before the choice are stored raw."""
ROOMY = 1.5
"""So many times the room that a sample like the first asks for is room for all."""
DISK_BYTES_PER_S = 1.5e9
"""Of a local disk whose pages are mostly in memory: it is not known before it is read,
and a guess that is wrong by half changes no choice between codecs of 0.5 and 5 GB/s."""


class Picker:
    """Encodes samples. For any thread.

    Args:
        name: of a codec, or "auto".
        samples: how many there are in an epoch.
        capacity: returns the bytes that there is room for.
        from_disk: whether that is on a disk.
        spare_cpu: returns the share of the CPUs, 0 to 1, that nobody uses.
        owner: as the log names the cache.
    """

    def __init__(
        self,
        name: str,
        samples: int,
        capacity: Callable[[], int],
        *,
        from_disk: bool,
        spare_cpu: Callable[[], float],
        owner: str,
    ) -> None:
        self._samples = samples
        self._capacity = capacity
        self._bandwidth = DISK_BYTES_PER_S if from_disk else math.inf
        self._spare_cpu = spare_cpu
        self._owner = owner
        self._lock = threading.Lock()
        self._seen: list[tuple[Any, int]] = []
        self._codec: Codec | None = None if name == "auto" else codec(name)

    def encoded(
        self, sample: Any, key: bytes, took_ns: int
    ) -> tuple[list[bytes | memoryview], int]:
        """Return the record of a sample, in parts, and its bytes if it were raw.

        Raises:
            UnstorableError: it cannot be stored.
        """
        chosen = self._codec
        record = encode_parts(sample, key, chosen or CODECS[0])
        if chosen is None:
            self._look(sample, took_ns)
        if chosen is None or not chosen.number:
            return record, sum(map(len, record))
        return record, describe(b"".join(record)).body_bytes

    def _look(self, sample: Any, took_ns: int) -> None:
        """Measure on this sample, too; choose once there are enough."""
        with self._lock:
            if self._codec is not None:
                return
            if self._all_fit(sample):
                self._codec = CODECS[0]
                return
            self._seen.append((sample, took_ns))
            if len(self._seen) < SAMPLES:
                return
            seen, self._seen = self._seen, []
            self._codec = codec(self._chosen(seen))

    def _all_fit(self, sample: Any) -> bool:
        """Whether all samples fit into RAM as they are: nothing is read sooner."""
        if self._bandwidth < math.inf:
            return False
        raw_bytes = sum(map(len, encode_parts(sample, bytes(16), CODECS[0])))
        return ROOMY * raw_bytes * self._samples <= self._capacity()

    def _chosen(self, seen: list[tuple[Any, int]]) -> str:
        samples = [sample for sample, _ in seen]
        raw_bytes = sum(len(encode(each, bytes(16), CODECS[0])) for each in samples)
        choice = choose(
            Facts(
                measure(samples),
                raw_bytes / len(seen),
                self._samples,
                sum(took_ns for _, took_ns in seen) / len(seen),
                self._capacity(),
                self._bandwidth,
                self._spare_cpu(),
            )
        )
        LOGGER.info("%s: %s", self._owner, choice)
        return choice.name
