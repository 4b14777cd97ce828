"""What is seen of a flow: where it has each row, and all that an event could change."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.engine.core.core import Flow

from .flow_script import SOURCE, Place

__all__ = ["Address", "rows_of", "sight_of"]

Address = tuple[int, int]
"""A row: the step of its batch, and its place in it."""


def rows_of(flow: Flow) -> Iterator[tuple[Address, Place]]:
    """Every row that the flow has somewhere; those that are done it no longer has."""
    for step, flight in flow.flights.items():
        for row in range(flight.next_row, flight.plan.n_rows):
            yield (step, row), (SOURCE, 0)
    for at, state in enumerate(flow.segments):
        for step, first, chunk, inputs, _ in state.pieces:
            assert inputs is None or len(inputs) == len(chunk)
            for row in range(first, first + len(chunk)):
                yield (step, row), ("ready", at)
    for lease in flow.leases:
        first = lease.chunk.first_row
        for row in range(first, first + len(lease.chunk)):
            yield (lease.chunk.step, row), ("lent", lease.segment)


def sight_of(flow: Flow) -> object:
    """Everything an event could change, to be compared."""
    return (
        sorted(rows_of(flow)),
        flow.head,
        flow.next_step,
        sorted(flow.outbox),
        [(s.head, s.waiting, s.ns_per_row, s.gauge.level) for s in flow.segments],
        [tuple(flight.remaining) for flight in flow.flights.values()],
        [len(flight.failures) for flight in flow.flights.values()],
        flow.account.statistics(),
        flow.account.purse.held_bytes,
        dict(flow.wakes),
    )
