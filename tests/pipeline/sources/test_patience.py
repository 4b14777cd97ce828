"""How long a remote read is waited for between its tries."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import BudgetError
from penstock.pipeline.sources import patience
from penstock.pipeline.sources.patience import MAX_WAIT_S, Patience


class Drawn:
    """Draws the bounds that it is given."""

    def uniform(self, least: float, most: float) -> Any:
        return least, most


def test_the_longest_wait_doubles_with_each_retry_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patience, "JITTER", Drawn())
    rule = Patience(backoff=3.0)._rules()["wait"]  # noqa: SLF001 tenacity is given it
    waits = [rule(SimpleNamespace(attempt_number=number)) for number in range(1, 6)]
    assert waits == [(0.0, most) for most in (3.0, 6.0, 12.0, MAX_WAIT_S, MAX_WAIT_S)]


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_a_read_is_tried_once_more_than_it_may_be_retried(retries: int) -> None:
    tries: list[str] = []

    def fail(path: str) -> bytes:
        tries.append(path)
        raise ConnectionResetError(path)

    with pytest.raises(ConnectionResetError):
        Patience(retries=retries, backoff=0).read(fail, "s3://a/b")
    assert tries == ["s3://a/b"] * (retries + 1)


def test_an_error_about_a_large_file_has_a_cure_for_every_source() -> None:
    with pytest.raises(BudgetError, match="copy it to a disk of this machine"):
        Patience(max_bytes=9).check_size(10, "s3://a/b")
