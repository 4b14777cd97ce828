"""Which codec records are written with: the user's choice, or one chosen by a rule.

Smaller records are read sooner, and more of them fit; raw ones cost no CPU. Which
matters more depends on the samples, the tier and the cost of computing a sample again.
`codec="auto"` measures the codecs on the first samples, takes the one that makes later
epochs shortest, and keeps it.
"""

from __future__ import annotations

import logging
import math
import statistics
import threading
import time
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .codec import CODECS, Codec, codec
from .record import KEY_BYTES, decode, encode, encode_parts, unpacked_bytes

LOGGER = logging.getLogger("penstock")
SAMPLES = 3
"""Samples measured before the choice; they are stored raw."""
ROOMY = 1.5
"""All samples fit if the room is this many times what the first one suggests."""
DISK_BYTES_PER_S = 1.5e9
"""Speed of a local disk whose pages are mostly in memory. It is a guess, because
nothing has been read yet. An error of half changes no choice between codecs of 0.5 and
5 GB/s."""
TRIES = 3
"""Repetitions of each measurement; the best counts."""
EPOCHS = 10
"""The cost of filling the cache is spread over this many epochs: a short training."""
TIE = 0.03
"""Costs this close, relatively, are equal: a few samples cannot separate them."""
SLIGHT = 0.02
"""A gain below this share of a sample's computing time is not worth a codec."""
NO_KEY = bytes(KEY_BYTES)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a codec achieves on a few samples, as means for one sample."""

    name: str
    nbytes: float
    """Size of its record."""
    encode_ns: float
    decode_ns: float


def measure(
    samples: Sequence[Any], clock: Callable[[], int] = time.perf_counter_ns
) -> list[Measured]:
    """Return what each codec achieves on some samples, the simplest first.

    Times are means over samples of the best of a few tries, as others may use the CPU.
    Loading a codec's library is not timed.

    Args:
        samples: at least one.
        clock: returns nanoseconds.

    Raises:
        UnstorableError: one of the samples cannot be stored.
    """

    def best_ns(work: Callable[[], object]) -> float:
        return min(timeit.repeat(work, timer=clock, repeat=TRIES, number=1))

    found = []
    for each in CODECS.values():
        records = [encode(sample, NO_KEY, each) for sample in samples]
        encodes = [partial(encode, sample, NO_KEY, each) for sample in samples]
        # A tier returns writable copies.
        decodes = [partial(decode, bytearray(record), NO_KEY) for record in records]
        found.append(
            Measured(
                each.name,
                nbytes=statistics.fmean(map(len, records)),
                encode_ns=statistics.fmean(map(best_ns, encodes)),
                decode_ns=statistics.fmean(map(best_ns, decodes)),
            )
        )
    return found


class Picker:
    """Encodes samples. Safe in any thread.

    Args:
        name: a codec's name, or "auto".
        owner: the name of the cache in the log.
        samples: number of samples in an epoch.
        capacity_bytes: bytes that the tier may hold.
        read_bytes_per_s: the speed of the tier; infinite for memory.
    """

    def __init__(
        self,
        name: str,
        owner: str,
        samples: int,
        capacity_bytes: float,
        read_bytes_per_s: float,
    ) -> None:
        self._owner = owner
        self._samples = samples
        self._capacity_bytes = capacity_bytes
        self._read_bytes_per_s = read_bytes_per_s
        self._lock = threading.Lock()
        # Samples, and how many nanoseconds each took to compute.
        self._seen: list[tuple[Any, int]] = []
        self._codec: Codec | None = None if name == "auto" else codec(name)

    def encoded(
        self, sample: Any, key: bytes, took_ns: int
    ) -> tuple[list[bytes | memoryview], int]:
        """Return a sample's record in parts, and the unpacked size of its body.

        Raises:
            UnstorableError: the sample cannot be stored.
        """
        record = encode_parts(sample, key, self._codec or CODECS[0])
        with self._lock:
            if self._codec is None:
                self._look(sample, sum(map(len, record)), took_ns)
        return record, unpacked_bytes(record)

    def expected(self, measured: Measured, compute_ns: float) -> tuple[float, float]:
        """Return a codec's expected cost in later epochs, as a mean for one sample.

        A full tier that keeps its content and admits no more has a hit rate in
        proportion to what fits, in whatever order (MinIO of CoorDL, J. Mohan et al.,
        VLDB 2021). Only admitted samples are encoded, once each.

        Args:
            measured: what the codec achieves.
            compute_ns: time that computing a sample takes, which a hit saves.

        Returns:
            the cost in nanoseconds, and the share of samples that are found, 0 to 1.
        """
        hit = min(1.0, self._capacity_bytes / (self._samples * measured.nbytes))
        read_ns = measured.decode_ns + 1e9 * measured.nbytes / self._read_bytes_per_s
        fill_ns = measured.encode_ns / EPOCHS
        return hit * (read_ns + fill_ns) + (1 - hit) * compute_ns, hit

    def choice(self, measured: Sequence[Measured], compute_ns: float) -> Codec:
        """Return the codec with the lowest expected cost, and log all costs.

        Args:
            measured: at least one; the simplest codec first, to which ties go.
            compute_ns: time that computing a sample takes.
        """
        costs = {each.name: self.expected(each, compute_ns) for each in measured}
        bound_ns = (1 + TIE) * min(costs.values())[0] + SLIGHT * compute_ns
        chosen = next(name for name, (ns, _) in costs.items() if ns <= bound_ns)
        shown = (
            f"{name} {ns / 1e6:.3f} ms ({hit:.0%} found)"
            for name, (ns, hit) in costs.items()
        )
        log = '%s: codec "%s"; expected per sample: %s'
        LOGGER.info(log, self._owner, chosen, ", ".join(shown))
        return codec(chosen)

    def _look(self, sample: Any, raw_bytes: int, took_ns: int) -> None:
        """Keep this sample for the measurement; choose once there are enough."""
        in_ram = self._read_bytes_per_s == math.inf
        if in_ram and ROOMY * raw_bytes * self._samples <= self._capacity_bytes:
            self._codec = CODECS[0]  # all fit, and smaller is no faster to read
            return
        self._seen.append((sample, took_ns))
        if len(self._seen) == SAMPLES:
            samples, times_ns = zip(*self._seen, strict=True)
            self._seen = []
            self._codec = self.choice(measure(samples), statistics.fmean(times_ns))
