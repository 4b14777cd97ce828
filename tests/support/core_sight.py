"""Views of a core: the place of each row, and everything that an event could change."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.engine.core.core import Core

from .core_script import SOURCE, Place

__all__ = ["Address", "rows_of", "sight_of"]

Address = tuple[int, int]
"""A row: the step of its batch, and its place in it."""


def rows_of(core: Core) -> Iterator[tuple[Address, Place]]:
    """Every row that the core has somewhere; those that are done it no longer has."""
    for step, in_flight in core.batches_in_flight.items():
        for row in range(in_flight.next_row, in_flight.plan.n_rows):
            yield (step, row), (SOURCE, 0)
    for at, state in enumerate(core.segments):
        for step, first, lease in state.ready:
            chunk, inputs = lease.chunk, lease.inputs
            one_a_row = inputs is None or len(inputs) == len(chunk)
            assert one_a_row if at <= core.placing else len(inputs or ()) == 1
            for row in range(first, first + len(chunk)):
                yield (step, row), ("ready", at)
    for lease in core.leases:
        first = lease.chunk.first_row
        for row in range(first, first + len(lease.chunk)):
            yield (lease.chunk.step, row), ("lent", lease.segment)


def sight_of(core: Core) -> object:
    """Everything an event could change, to be compared."""
    return (
        sorted(rows_of(core)),
        core.head,
        core.next_step,
        sorted(core.outbox),
        [(s.head, s.waiting, s.ns_per_row, s.gauge.level) for s in core.segments],
        [tuple(in_flight.remaining) for in_flight in core.batches_in_flight.values()],
        [len(in_flight.failures) for in_flight in core.batches_in_flight.values()],
        (core.reservations.held_bytes, core.reservations.peak_bytes),
        core.reservations.batch_bytes,
        core.reservations.byte_budget.held_bytes,
        dict(core.wakes),
        core.state,
    )
