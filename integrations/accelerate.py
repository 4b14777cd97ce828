"""Accelerate with penstock's loaders inside its wrappers.

    from penstock.integrations.accelerate import prepare
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader)

`Accelerator.prepare` shards, moves to the device and synchronises, and builds a plain
torch DataLoader for that, out of any subclass. Here it does all of this, and the plain
loader is then exchanged for one of penstock's over the same shard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, IterableDataset

from ..pipeline.dataloader import DataLoader, known_bypass

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["keep", "prepare", "skip_first_batches"]

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
"""Arguments of torch's that do not say which samples there are."""
OWN = ("sample_seeding", "thread_safe")


def prepare(accelerator: Accelerator, *objects: Any, **settings: Any) -> Any:
    """Do what `accelerator.prepare(*objects)` does, and keep our loaders in it.

    Their states are exact also within an epoch: `accelerator.save_state` and
    `load_state` carry them, so nothing has to be skipped after `load_state`.

    Args:
        accelerator: the user's.
        *objects: models, optimizers, loaders, schedulers, as Accelerate takes them.
        **settings: as Accelerate takes them (`device_placement`).

    Returns:
        What Accelerate returns: one object, or a tuple of as many as were given.
    """
    with known_bypass():
        prepared = accelerator.prepare(*objects, **settings)
    pairs = zip(objects, prepared if len(objects) > 1 else (prepared,), strict=True)
    for before, after in pairs:
        if isinstance(before, DataLoader):
            keep(after, before)
    return prepared


def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
    """Return a prepared loader that leaves out its first batches; none is loaded.

    Args:
        loader: as `prepare` returned it.
        num_batches: to leave out, of the first loop over what is returned.
    """
    from accelerate import skip_first_batches as skip

    skipping = skip(loader, num_batches)
    base = getattr(loader, "base_dataloader", None)
    return keep(skipping, base) if isinstance(base, DataLoader) else skipping


def keep(prepared: Any, like: Any = None) -> Any:
    """Exchange the plain loader within one of Accelerate's for penstock's; return it.

    Args:
        prepared: a `DataLoaderShard` or `DataLoaderDispatcher` of Accelerate's.
        like: penstock's loader that it was made from, for its settings.
    """
    base = getattr(prepared, "base_dataloader", None)
    if base is None or isinstance(base, DataLoader):
        return prepared
    settings = {name: getattr(base, name) for name in CARRIED if hasattr(base, name)}
    if like is not None:
        settings |= {name: getattr(like, name) for name in OWN}
    prepared.base_dataloader = DataLoader(base.dataset, **settings, **_order(base))
    # It stands for "has a state worth saving": its own is exact after every batch.
    prepared.use_stateful_dataloader = True
    prepared.dl_state_dict = prepared.base_dataloader.state_dict()
    return prepared


def _order(base: Any) -> dict[str, Any]:
    """Return the arguments that say which samples a loader has, and in what batches."""
    if isinstance(base.dataset, IterableDataset):
        return {"batch_size": base.batch_size, "drop_last": base.drop_last}
    if isinstance(base.sampler, BatchSampler) and base.batch_size is None:
        return {"batch_size": None, "sampler": base.sampler}
    return {"batch_sampler": base.batch_sampler}
