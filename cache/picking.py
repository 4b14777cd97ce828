"""Which codec records are written with: the user's choice, or one chosen by a rule.

Smaller records are read sooner, and more of them fit; raw ones cost no CPU. Which
matters more depends on the samples, the room and the cost of computing a sample again.
With `codec="auto"`, one of the first samples decides, for good.
"""

from __future__ import annotations

import logging
import threading
import timeit
from functools import partial
from typing import Any

from .codec import CODECS, Codec, codec
from .record import KEY_BYTES, decode, encode, encode_parts, unpacked_bytes

LOGGER = logging.getLogger("penstock")
CHOSEN = '%s: codec "%s"; expected per sample: %s'
DECIDES = 3
"""The number of the sample that decides; caches are warm by then."""
ROOMY = 1.5
"""All samples fit if the room is this many times what that one suggests."""
TRIES = 3
"""Repetitions of each measurement; the best counts, as others may use the CPU."""
TIE = 0.03
"""Costs this close, relatively, are equal: one sample cannot separate them."""
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
        self._lock = threading.Lock()
        self._seen = 0
        self._codec: Codec | None = None if name == "auto" else codec(name)

    def encoded(
        self, sample: Any, key: bytes, took_ns: int
    ) -> tuple[list[bytes | memoryview], int]:
        """Return a sample's record in parts, and the unpacked size of its body.

        Raises:
            UnstorableError: the sample cannot be stored.
        """
        record = encode_parts(sample, key, self._codec or CODECS[0])
        if self._codec is None:
            with self._lock:
                self._seen += 1
                if self._seen == DECIDES:
                    self._codec = self._choice(sample, sum(map(len, record)), took_ns)
        return record, unpacked_bytes(record)

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
        for each in CODECS.values():
            record = encode(sample, NO_KEY, each)
            # A tier returns writable copies.
            unpack = partial(decode, bytearray(record), NO_KEY)
            unpack_ns = 1e9 * min(timeit.repeat(unpack, repeat=TRIES, number=1))
            costs[each.name] = self.expected_ns(len(record), unpack_ns, compute_ns)
        least_ns = (1 + TIE) * min(costs.values())
        chosen = next(name for name, ns in costs.items() if ns <= least_ns)
        shown = (f"{name} {ns / 1e6:.3f} ms" for name, ns in costs.items())
        LOGGER.info(CHOSEN, self._owner, chosen, ", ".join(shown))
        return codec(chosen)
