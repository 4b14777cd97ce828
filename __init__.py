"""penstock: an input pipeline for PyTorch that tunes itself.

import penstock as ps

ps.set_enable_autotune(True)
pipe = ps.Pipeline.from_dataset(dataset).shuffle(seed=0).map(augment).batch(64)
for batch in pipe:
    ...
print(pipe.explain())
"""

import importlib as _importlib
import typing as _typing

from .config import (
    get_autotune_interval,
    get_enable_autotune,
    get_num_parallel_workers,
    get_prefetch_size,
    get_seed,
    set_autotune_interval,
    set_cpu_budget,
    set_enable_autotune,
    set_memory_budget,
    set_num_parallel_workers,
    set_prefetch_size,
    set_seed,
)
from .errors import (
    BudgetError,
    PenstockError,
    SampleError,
    SpecError,
    StateError,
    WorkerError,
)
from .system.garbage import collected_later as _collected_later

if _typing.TYPE_CHECKING:
    from .autotune.log import on_verdict
    from .engine.plan import BatchPlan, Shard
    from .pipeline import detection, image, optim, schedule, testing, text
    from .pipeline.dataloader import DataLoader
    from .pipeline.pipeline import Pipeline

__version__ = "0.1.0"

__all__ = [
    "BatchPlan",
    "BudgetError",
    "DataLoader",
    "PenstockError",
    "Pipeline",
    "SampleError",
    "Shard",
    "SpecError",
    "StateError",
    "WorkerError",
    "__version__",
    "config",
    "detection",
    "get_autotune_interval",
    "get_enable_autotune",
    "get_num_parallel_workers",
    "get_prefetch_size",
    "get_seed",
    "image",
    "on_verdict",
    "optim",
    "schedule",
    "set_autotune_interval",
    "set_cpu_budget",
    "set_enable_autotune",
    "set_memory_budget",
    "set_num_parallel_workers",
    "set_prefetch_size",
    "set_seed",
    "testing",
    "text",
]


_LAZY = {
    "BatchPlan": ".engine.plan",
    "DataLoader": ".pipeline.dataloader",
    "Pipeline": ".pipeline.pipeline",
    "Shard": ".engine.plan",
    "on_verdict": ".autotune.log",
}


def __getattr__(name: str) -> object:
    """Load what brings libraries of its own (torch, Pillow) when it is used."""
    if name in ("detection", "image", "optim", "schedule", "testing", "text"):
        return _importlib.import_module(f".pipeline.{name}", __name__)
    if name in _LAZY:
        with _collected_later():
            module = _importlib.import_module(_LAZY[name], __name__)
        return globals().setdefault(name, getattr(module, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return what there is, loaded or not."""
    return sorted({*globals(), *__all__})
