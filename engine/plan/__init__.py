"""What is loaded and when, decided in advance: pure, and O(1) in the dataset.

    order.py        Order: which sample is at which position of an epoch, shuffled by a
                    Shuffle, a permutation with random access; AssignedPlan: the
                    work of a worker process, as it comes
    timeline.py     Schedule: batch size, image size, learning rate, momentum by place;
                    Timeline: batch numbers to positions and back, across sizes
    group_shuffle.py
                    GroupShuffle: shards first, then the samples of a few of them
    part_shuffle.py PartShuffle: each rank reads its own part of the data
    buckets.py      Buckets: samples of similar length together; BudgetTimeline:
                    batches of a number of tokens
    shard.py        Shard: this rank's part of a global batch
    plan.py         Plan: all of these together, by step
    batch_plan.py   BatchPlan: the stamp that a batch carries
    cursor.py       Cursor: where the next batch starts, and its state dict
    drawn.py        DrawnPlan: batches drawn by torch's samplers, not pure, not O(1);
                    Drawing: the origin of their order, and its state dict

Other packages use only the names below.
"""

from __future__ import annotations

from .batch_plan import BatchPlan, Context
from .buckets import Buckets, Lengths
from .cursor import Cursor, read_state
from .drawn import Drawing, DrawnPlan, as_yielded
from .group_shuffle import group_shuffle
from .order import AssignedPlan, Order, PlannedBatch, Planning, Rows, Shuffle
from .part_shuffle import shuffled_by_part
from .plan import Plan, Tail
from .shard import Shard
from .timeline import Change, ConstantSchedule, Place, Schedule, Setting

__all__ = [
    "AssignedPlan",
    "BatchPlan",
    "Buckets",
    "Change",
    "ConstantSchedule",
    "Context",
    "Cursor",
    "Drawing",
    "DrawnPlan",
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
    "as_yielded",
    "group_shuffle",
    "read_state",
    "shuffled_by_part",
]
