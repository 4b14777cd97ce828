"""What is kept when there is no room for all: the rules, as pure functions.

In an epoch each sample is asked for once, in an order that chance made. So all are
worth the same, and what serves best is to keep what came first and to evict nothing:
with room for a share of the samples, that share of them is found. To evict the least
recently used keeps those that come last in the next epoch, of which most are evicted
again before they are asked for (J. Mohan et al., "Analyzing and Mitigating Data Stalls
in DNN Training", VLDB 2021, section 4.2, MinIO; `benchmarks/cache.py` shows both).

What may go is what nobody asks for any more: another image size, an older data set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["RESTING_S", "all_idle", "victims"]

RESTING_S = 3600.0
"""A namespace on disk that nobody has opened or written to for so long may go: there is
no telling whether another job waits to go on with it."""


def all_idle(others: Iterable[tuple[int, int]], lookups: int) -> bool:
    """Whether nobody asks for the other namespaces of an arena any more.

    One that is in use is asked for within an epoch, so before as many lookups were made
    as it has records.

    Args:
        others: of each, its records, and `lookups` when it was last asked for.
        lookups: made in the arena so far.
    """
    found = list(others)
    return bool(found) and all(lookups - last > records for records, last in found)


def victims(
    held: Mapping[bytes, tuple[float, int]], now_s: float, wanted: int
) -> list[bytes]:
    """Return which namespaces on disk are to go, those unused for longest first.

    Args:
        held: of each that is not in use here: when it was last used, its bytes.
        now_s: on the same clock.
        wanted: bytes to be freed; no more go than that takes.
    """
    chosen = []
    for name in sorted(held, key=lambda name: held[name][0]):
        used_s, nbytes = held[name]
        if wanted <= 0 or now_s - used_s <= RESTING_S:
            break
        chosen.append(name)
        wanted -= nbytes
    return chosen
