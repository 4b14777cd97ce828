"""The user's functions that are called with each verdict."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .explain import Explanation

LOGGER = logging.getLogger("penstock")
Listener = Callable[[str, "Explanation"], object]

_listeners: list[Listener] = []


def on_verdict(listener: Listener) -> Callable[[], object]:
    """Have `listener(name, explanation)` called with each verdict of a tuned pipeline.

    It is called in the tuner's thread, when the log records a verdict: once a minute
    and when it changes. If it raises, the exception is logged and it is not called
    again.

    Args:
        listener: takes the pipeline's name in the log, and what `explain()` would say.

    Returns:
        A function that stops further calls.
    """
    _listeners.append(listener)

    def end() -> None:
        if listener in _listeners:
            _listeners.remove(listener)

    return end


def tell_verdict(name: str, explanation: Explanation) -> None:
    """Call every listener; one that raises is removed."""
    for listener in list(_listeners):
        try:
            listener(name, explanation)
        except Exception:
            _listeners.remove(listener)
            LOGGER.exception("a listener of verdicts failed, and gets no more of them")
