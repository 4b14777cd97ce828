"""The codec of a cache: the user's, or one that one of its first samples decides."""

from __future__ import annotations

import logging
import math
import timeit
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import record as module
from penstock.cache.codec import CODECS, Codec
from penstock.cache.record import (
    DECIDES,
    KEY_BYTES,
    ROOMY,
    TIE,
    Picker,
    decode,
    encode,
)

SAMPLE = np.zeros(1000, np.uint8)
"""Any codec but none at all makes it small."""
KEY = bytes(KEY_BYTES)
MS = 1_000_000


def stored(picker: Picker, count: int, computed_in: int = 10 * MS) -> list[int]:
    """Store samples, each computed in so many ns; return the size of each record."""
    sizes = []
    for _ in range(count):
        record = b"".join(picker.encoded(SAMPLE, KEY, computed_in))
        assert np.array_equal(decode(bytearray(record), KEY), SAMPLE)
        sizes.append(len(record))
    return sizes


RAW_BYTES = len(encode(SAMPLE, KEY, CODECS[0]))
ENOUGH = math.ceil(ROOMY * RAW_BYTES * 100)
"""Room for 100 samples as they are."""


def test_the_first_samples_are_stored_raw_and_one_decides_for_all_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "penstock")
    sizes = stored(Picker("auto", "Cache(ID:2)", 100, ENOUGH / 20), DECIDES + 3)
    assert sizes[:DECIDES] == [RAW_BYTES] * DECIDES
    assert max(sizes[DECIDES:]) < SAMPLE.nbytes / 2
    (message,) = caplog.messages
    assert message.startswith('Cache(ID:2): codec "')
    assert all(f"{codec.name} " in message for codec in CODECS.values())
    assert "; expected per sample: raw 9." in message


def test_with_room_for_all_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: object, **__: object) -> list[float]:
        raise AssertionError

    monkeypatch.setattr(timeit, "repeat", never)
    roomy = Picker("auto", "", 100, ENOUGH)
    assert stored(roomy, 2 * DECIDES) == [RAW_BYTES] * 2 * DECIDES
    short = Picker("auto", "", 100, ENOUGH - 1)
    with pytest.raises(AssertionError):
        stored(short, DECIDES)


def test_a_codec_that_the_user_names_is_used_from_the_first_sample_on() -> None:
    assert max(stored(Picker("zstd", "", 100, 0), 2)) < SAMPLE.nbytes / 2


# The rule, on codecs whose sizes and times are given


@dataclass
class Codecs:
    """Bytes of a record, and nanoseconds to unpack it, by name."""

    known: dict[str, tuple[int, float]]

    def encode(self, _: object, __: bytes, codec: Codec) -> bytes:
        return codec.name.encode().ljust(self.known[codec.name][0], b"\0")

    def repeat(self, unpack: Callable[[], object], **_: object) -> list[float]:
        (record, _) = unpack.args  # type: ignore[attr-defined]
        name = record.rstrip(b"\0").decode()
        return [self.known[name][1] / 1e9]


PHOTOGRAPHS = {
    "raw": (150_000, 15_000.0),
    "lz4": (139_500, 30_000.0),
    "zstd": (129_000, 160_000.0),
    "filter": (73_500, 290_000.0),
}
MASKS = {
    "raw": (150_000, 15_000.0),
    "lz4": (15_000, 20_000.0),
    "zstd": (9_000, 60_000.0),
    "filter": (10_500, 190_000.0),
}
NOISE = dict.fromkeys(PHOTOGRAPHS, (150000, 15000.0))
ALL = 150_000 * 1000
"""The bytes of all samples, as they are."""


def chosen(
    known: dict[str, tuple[int, float]], room: float, computed_in: int
) -> tuple[str, dict[str, float]]:
    """Return the codec for 1000 samples, and what each is expected to cost."""
    picker = Picker("auto", "", 1000, room)
    codecs = Codecs(known)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "encode", codecs.encode)
        patched.setattr(timeit, "repeat", codecs.repeat)
        raw_bytes = known["raw"][0]
        name = picker._choice(None, raw_bytes, computed_in).name  # noqa: SLF001
    costs = {
        name: picker.expected_ns(nbytes, unpack_ns, computed_in)
        for name, (nbytes, unpack_ns) in known.items()
    }
    return name, costs


@pytest.mark.parametrize(
    ("known", "room", "computed_in", "name"),
    [
        (PHOTOGRAPHS, 1.5 * ALL, 1_500_000, "raw"),
        (PHOTOGRAPHS, 0.5 * ALL, 1_500_000, "filter"),
        (PHOTOGRAPHS, 0.5 * ALL, 200_000, "raw"),
        (NOISE, 0.5 * ALL, 1_500_000, "raw"),
        (MASKS, 0.5 * ALL, 1_500_000, "lz4"),
        (MASKS, ALL / 12, 10_000_000, "zstd"),
        (PHOTOGRAPHS, 0, 1_500_000, "raw"),
    ],
    ids=[
        "all fits",
        "half fits, and it is dear to compute",
        "half fits, and it is cheap to compute",
        "half fits, and nothing makes it smaller",
        "half fits, and lz4 makes all fit",
        "a twelfth fits, and it is very dear to compute",
        "nothing fits",
    ],
)
def test_the_codec_suits_the_samples_and_the_room(
    known: dict[str, tuple[int, float]], room: float, computed_in: int, name: str
) -> None:
    assert chosen(known, room, computed_in)[0] == name


def test_a_cost_is_the_expected_cost_of_hits_and_misses() -> None:
    half = Picker("auto", "", 1000, 500 * 73_500)
    cost_ns = half.expected_ns(73_500, 290_000, 1_500_000)
    assert cost_ns == pytest.approx(0.5 * 290_000 + 0.5 * 1_500_000)


each_codec = st.tuples(st.integers(150, 180_000), st.floats(1, 1e9))


@given(
    st.fixed_dictionaries({codec.name: each_codec for codec in CODECS.values()}),
    st.floats(0, 1e9),
    st.integers(1, 10**9),
)
def test_no_simpler_codec_is_as_good_and_no_other_is_much_better(
    known: dict[str, tuple[int, float]], room: float, computed_in: int
) -> None:
    name, costs = chosen(known, room, computed_in)
    if ROOMY * known["raw"][0] * 1000 <= room:
        assert name == "raw"
        return
    bound = min(costs.values()) * (1 + TIE)
    assert costs[name] <= bound
    names = [codec.name for codec in CODECS.values()]
    assert all(costs[codec] > bound for codec in names[: names.index(name)])
