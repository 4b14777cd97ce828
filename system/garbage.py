"""Collections of garbage that come later."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collected_later() -> Iterator[None]:
    """Postpone collections while modules are imported.

    torch's import leaves some 100,000 objects and a full collection of them nearly due,
    which takes 0.1 s. Our imports would bring it about before a program's first batch.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
