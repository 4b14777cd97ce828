"""Numbers in the log are shown as people say them, with the digits that matter."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.autotune import phrases

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("phrase", "number", "shown"),
    [
        (phrases.count, 3.6, "3.6"),
        (phrases.count, 19.94, "19.9"),
        (phrases.count, 20, "about 20"),
        (phrases.count, 51.2, "about 51"),
        (phrases.count, 187, "about 190"),
        (phrases.count, 1234, "about 1,200"),
        (phrases.speedup, 1.74, "at most 1.7x faster"),
        (phrases.speedup, 20, "at most 20x faster"),
        (phrases.speedup, 100, "at most 100x faster"),
        (phrases.speedup, 101, "more than 100x faster"),
        (phrases.size, GIB, "1.0 GiB"),
        (phrases.size, GIB - MIB, "1023 MiB"),
        (phrases.size, 10 * MIB, "10 MiB"),
        (phrases.size, 2.5 * MIB, "2.5 MiB"),
        (phrases.size, MIB, "1.0 MiB"),
        (phrases.size, 8, "8 bytes"),
        (phrases.size, 1536, "1.5 KiB"),
        (phrases.ms, 0.0123, "12.30"),
        (phrases.ms, 0.0001, "0.10"),
        (phrases.ms, 0.0000123, "0.0123"),
        (phrases.ms, 0.00005, "0.05"),
        (phrases.ms, 0.0, "0"),
        (phrases.per_s, 1234.4, "1234"),
        (phrases.per_s, 10, "10"),
        (phrases.per_s, 9.46, "9.5"),
        (phrases.per_s, 0.123, "0.12"),
    ],
)
def test_a_number_has_the_digits_that_matter(
    phrase: Callable[[float], str], number: float, shown: str
) -> None:
    assert phrase(number) == shown


def test_large_rates_may_have_their_thousands_apart() -> None:
    assert phrases.per_s(1234.4, thousands=",") == "1,234"
