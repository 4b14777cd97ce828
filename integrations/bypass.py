"""Whether a framework that builds plain loaders is known to do so just now."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

__all__ = ["BYPASS", "BYPASSED", "known_bypass"]

BYPASSED = (
    "Accelerate builds a plain torch DataLoader from this one, so penstock neither"
    " loads nor tunes; keep it with penstock.integrations.accelerate.prepare("
    "accelerator, ...) in place of accelerator.prepare(...)"
)


class Bypass(threading.local):
    """Whether Accelerate is at work on loaders that are put back afterwards."""

    known = False


BYPASS = Bypass()


@contextlib.contextmanager
def known_bypass() -> Iterator[None]:
    """Say nothing of Accelerate's plain loaders within."""
    before, BYPASS.known = BYPASS.known, True
    try:
        yield
    finally:
        BYPASS.known = before
