"""Accelerate with penstock's loaders inside its wrappers.

    from penstock.integrations.accelerate import prepare
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader)

`Accelerator.prepare` shards the data, moves batches to the device and synchronises the
ranks. To do so, it builds a plain torch DataLoader, even from a subclass. `prepare`
here calls it, and then replaces the plain loader by penstock's over the same shard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, IterableDataset

from ..pipeline.dataloader import KNOWN_BYPASS, DataLoader

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["keep", "prepare", "skip_first_batches"]

# torch's arguments that do not affect which samples are loaded.
CARRIED = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)
# penstock's own arguments.
OWN = ("sample_seeding", "thread_safe")


def prepare(accelerator: Accelerator, *objects: Any, **settings: Any) -> Any:
    """Call `accelerator.prepare(*objects)`, but keep penstock's loaders.

    Their states are exact even within an epoch. `accelerator.save_state` and
    `load_state` include them, so no batches need to be skipped after `load_state`.

    Args:
        accelerator: the accelerator of the training script.
        *objects: models, optimizers, loaders and schedulers, as for Accelerate.
        **settings: other arguments, as for Accelerate (`device_placement`).

    Returns:
        One prepared object for one object, otherwise a tuple of them.

    Raises:
        Exception: whatever Accelerate raises.
    """
    token = KNOWN_BYPASS.set(True)
    try:
        prepared = accelerator.prepare(*objects, **settings)
    finally:
        KNOWN_BYPASS.reset(token)
    for before, after in zip(
        objects, prepared if len(objects) > 1 else (prepared,), strict=True
    ):
        if isinstance(before, DataLoader):
            keep(after, before)
    return prepared


def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
    """Return a prepared loader that skips its first batches, without loading them.

    Args:
        loader: a loader returned by `prepare`.
        num_batches: batches to skip in the first loop over the returned loader.
    """
    from accelerate import skip_first_batches as skip

    skipping = skip(loader, num_batches)
    base = getattr(loader, "base_dataloader", None)
    return keep(skipping, base) if isinstance(base, DataLoader) else skipping


def keep(prepared: Any, like: Any = None) -> Any:
    """Replace the plain loader inside one of Accelerate's by penstock's; return that.

    Args:
        prepared: a `DataLoaderShard` or `DataLoaderDispatcher` of Accelerate's.
        like: the penstock loader that it was made from, whose settings it keeps.
    """
    base = getattr(prepared, "base_dataloader", None)
    if base is None or isinstance(base, DataLoader):
        return prepared
    settings = {name: getattr(base, name) for name in CARRIED if hasattr(base, name)}
    if like is not None:
        settings |= {name: getattr(like, name) for name in OWN}
    explicit = like is not None and like._zero_workers  # noqa: SLF001 a loader of ours
    if not (base.num_workers or explicit):
        del settings["num_workers"]  # nobody wrote that 0
    prepared.base_dataloader = DataLoader(base.dataset, **settings, **_order(base))
    # To Accelerate, this means "has a state worth saving"; penstock's is exact after
    # every batch.
    prepared.use_stateful_dataloader = True
    prepared.dl_state_dict = prepared.base_dataloader.state_dict()
    return prepared


def _order(base: Any) -> dict[str, Any]:
    """Return the arguments that decide which samples a loader puts in which batch."""
    if isinstance(base.dataset, IterableDataset):
        return {"batch_size": base.batch_size, "drop_last": base.drop_last}
    if isinstance(base.sampler, BatchSampler) and base.batch_size is None:
        return {"batch_size": None, "sampler": base.sampler}
    return {"batch_sampler": base.batch_sampler}
