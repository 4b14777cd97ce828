"""When the codec of a cache is chosen: by its first samples, once, for good."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest

from penstock.cache import picking
from penstock.cache.codec import CODECS
from penstock.cache.picking import (
    DISK_BYTES_PER_S,
    SAMPLES,
    Measured,
    Picker,
)
from penstock.cache.record import KEY_BYTES, decode

SAMPLE = np.zeros(1000, np.uint8)
"""Any codec but none at all makes it small."""
KEY = bytes(KEY_BYTES)
Asked = list[float]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Note what samples cost to compute; zstd costs nothing, so that it is chosen."""
    noted: Asked = []

    def expected(
        _: Picker, measured: Measured, compute_ns: float
    ) -> tuple[float, float]:
        noted.append(compute_ns)
        return 1e6 * (measured.name != "zstd"), 1.0

    monkeypatch.setattr(Picker, "expected", expected)
    return noted


def picker(
    name: str = "auto", samples: int = 100, capacity: int = 0, *, disk: bool = True
) -> Picker:
    speed = DISK_BYTES_PER_S if disk else math.inf
    return Picker(name, "Cache(ID:2)", samples, capacity, speed)


def sizes(picker: Picker, count: int, computed_in: int = 50) -> list[int]:
    """Store samples, each computed in so many ns; return the size of each record."""
    found = []
    for _ in range(count):
        parts, unpacked = picker.encoded(SAMPLE, KEY, computed_in)
        record = b"".join(map(bytes, parts))
        assert unpacked >= SAMPLE.nbytes
        assert np.array_equal(decode(bytearray(record), KEY), SAMPLE)
        found.append(len(record))
    return found


def test_the_first_samples_are_stored_raw_and_choose_for_all_others(
    asked: Asked, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock")
    found = sizes(picker(), SAMPLES + 3)
    assert min(found[:SAMPLES]) > SAMPLE.nbytes
    assert max(found[SAMPLES:]) < SAMPLE.nbytes / 2
    assert len(asked) == len(CODECS)
    (told,) = caplog.messages
    assert told.startswith(
        'Cache(ID:2): codec "zstd"; expected per sample: raw 1.000 ms'
    )
    assert "zstd 0.000 ms (100% found)" in told


def test_the_choice_rests_on_the_mean_cost_of_the_samples(asked: Asked) -> None:
    measured = picker(samples=100, capacity=5000)
    for each in range(SAMPLES):
        sizes(measured, 1, computed_in=10 * each)
    assert asked.pop() == 10


def test_memory_with_room_for_all_needs_no_measurement(asked: Asked) -> None:
    (raw,) = sizes(picker("raw"), 1)
    enough = math.ceil(picking.ROOMY * raw * 100)
    roomy = picker(capacity=enough, disk=False)
    assert sizes(roomy, 2 * SAMPLES) == [raw] * 2 * SAMPLES
    assert asked == []
    for other in (
        picker(capacity=enough - 1, disk=False),
        picker(capacity=enough, disk=True),  # smaller is read sooner
    ):
        sizes(other, SAMPLES)
        assert asked.pop() == 50


def test_a_codec_that_the_user_names_is_used_from_the_first_sample_on(
    asked: Asked,
) -> None:
    assert max(sizes(picker("zstd"), 2 * SAMPLES)) < SAMPLE.nbytes / 2
    assert asked == []
