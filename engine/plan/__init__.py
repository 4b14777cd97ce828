"""What is loaded and when, decided in advance: pure, and O(1) in the dataset.

    order.py        Order: which sample is at which position of an epoch, shuffled by a
                    Shuffle, a permutation with random access;
                    Shard: this rank's part of a global batch;
                    BatchPlan: the stamp that a batch carries; Planning: what an engine
                    asks; AssignedPlan: the work of a worker process, as it comes
    shuffles.py     GroupShuffle: shards first, then the samples of a few of them;
                    PartShuffle: each rank reads its own part of the data
    buckets.py      Buckets: samples of similar length together; BudgetTimeline:
                    batches of a number of tokens
    plan.py         Schedule: batch size, image size, learning rate, momentum by place;
                    Timeline: batch numbers to positions and back, across sizes;
                    Plan: all of these together, by step;
                    Cursor: where the next batch starts, and its state dict
    drawn.py        DrawnPlan: batches drawn by torch's samplers, not pure, not O(1);
                    Drawing: the origin of their order, and its state dict

Other packages import only the names below.
"""

from __future__ import annotations

from .buckets import Buckets, Lengths
from .drawn import AHEAD, Drawing, DrawnPlan, LateOrder, as_yielded
from .order import (
    AssignedPlan,
    BatchPlan,
    Context,
    Order,
    Place,
    PlannedBatch,
    Planning,
    Rows,
    Shard,
    Shuffle,
)
from .plan import (
    Change,
    ConstantSchedule,
    Cursor,
    Plan,
    Schedule,
    Setting,
    Tail,
    Timeline,
    read_state,
)
from .shuffles import group_shuffle, shuffled_by_part

__all__ = [
    "AHEAD",
    "AssignedPlan",
    "BatchPlan",
    "Buckets",
    "Change",
    "ConstantSchedule",
    "Context",
    "Cursor",
    "Drawing",
    "DrawnPlan",
    "LateOrder",
    "Lengths",
    "Order",
    "Place",
    "Plan",
    "PlannedBatch",
    "Planning",
    "Rows",
    "Schedule",
    "Setting",
    "Shard",
    "Shuffle",
    "Tail",
    "Timeline",
    "as_yielded",
    "group_shuffle",
    "read_state",
    "shuffled_by_part",
]
