"""Collections of garbage that come later."""

import contextlib
import gc
import os
from collections.abc import Iterator

# Those that will enable collections again: as many as begin loops at this moment.
_debtors: list[object] = []


@contextlib.contextmanager
def collected_later() -> Iterator[None]:
    """Postpone collections while modules are imported.

    torch's import leaves some 100,000 objects and a full collection of them nearly due,
    which takes 0.1 s. Our imports would bring it about before a program's first batch.
    """
    enabled, debtor = gc.isenabled(), object()
    try:  # an interrupt may come between any two steps
        if enabled:
            _debtors.append(debtor)
        gc.disable()
        yield
    finally:
        if enabled:
            gc.enable()
            with contextlib.suppress(ValueError):
                _debtors.remove(debtor)


def _after_fork() -> None:
    """Enable collections in a child: nobody else would, who left them off in us."""
    if _debtors:
        _debtors.clear()
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
