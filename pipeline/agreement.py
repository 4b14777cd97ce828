"""A check, once before the first batch, that all ranks are about to load the same.

Ranks whose plans differ, or where they begin, would hang in a collective at some later
step. Each rank writes the facts that decide its batches to the store of the process
group, which all ranks can read, and compares them. Nothing is pickled, and no
collective is called.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import __version__ as torch_version

from ..engine.plan import Cursor, Shard
from ..errors import LOGGER, PenstockError
from .image.codec import CropDecoder
from .stages import FunctionStage, Stage

# How long other ranks may take to arrive here; setting up a rank can be slow.
WAIT = timedelta(seconds=60)
# Pipelines begun in this process; the order is the same on all ranks.
NUMBERS = itertools.count()
CURE = (
    "all ranks must make the same pipelines, load the same state, if any, and start in"
    " the same order; for a pipeline of a single rank (such as validation on rank 0),"
    " pass shard=ps.Shard.single()"
)


def agree(
    shard: Shard, facts: Mapping[str, object], cursor: Cursor, stages: Sequence[Stage]
) -> None:
    """Compare what this rank is about to load with the other ranks.

    Args:
        shard: the shard of this rank.
        facts: the facts that decide the global batches; small, JSON.
        cursor: where the first batch starts.
        stages: the stages. Ranks with and without a crop decoder find damage in
            different files. An operator inside a user's function is not found.

    Raises:
        PenstockError: another rank differs; the message names the rank and the fact.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    mine = {
        **facts,
        **{
            f"decoder of {stage.label}": decoder.__penstock_fingerprint__()
            for stage in stages
            if isinstance(stage, FunctionStage)
            and isinstance(
                decoder := getattr(stage.function, "decoder", None), CropDecoder
            )
        },
        "epoch": cursor.epoch,
        "step": cursor.step,
        "data-parallel ranks": shard.size,
        "torch": str(torch_version),
        "python": platform.python_version(),
    }
    rank, world = dist.get_rank(), dist.get_world_size()
    # When torchrun restarts ranks, it keeps the store with the entries of dead ranks.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"penstock/agreement/{attempt}/{next(NUMBERS)}"
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 no public way
    store.set(f"{prefix}/{rank}", json.dumps(mine))
    others = [other for other in range(world) if other != rank]
    try:  # all facts at once: one slow rank then costs the wait only once
        store.wait([f"{prefix}/{other}" for other in others], WAIT)
    except dist.DistStoreError:
        LOGGER.warning(
            "not all of the %d ranks have begun this pipeline within %d s, so they were"
            " not compared; %s",
            world,
            WAIT.total_seconds(),
            CURE,
        )
        return
    for other in others:
        compare(rank, mine, other, json.loads(store.get(f"{prefix}/{other}")))


def compare(
    rank: int, mine: Mapping[str, object], other: int, theirs: Mapping[str, object]
) -> None:
    """Raise `PenstockError` if two ranks differ."""
    differences = [
        f"{name}: {mine.get(name)!r} on rank {rank}, {theirs.get(name)!r} on {other}"
        for name in sorted({*mine, *theirs})
        if mine.get(name) != theirs.get(name)
    ]
    if differences:
        raise PenstockError(
            f"the ranks are about to load different things: {'; '.join(differences)};"
            f" {CURE}"
        )
