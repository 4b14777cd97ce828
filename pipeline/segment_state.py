"""One segment's share of the flow: what waits before it, how far it may go. Pure."""

from __future__ import annotations

import heapq
from typing import Any

from .chunk import Chunk
from .flight import Flight
from .metrics import Gauge

__all__ = ["Piece", "SegmentState"]

LEASE_NS = 1_500_000
"""Work in one lease: long against the hand-over (some 20 us), short against a batch."""
FAR_LEASE_NS = 20_000_000
"""The same where the hand-over is to another process: some 300 us of CPU, all told."""
PATIENCE_NS = 200_000_000
"""A lease that waits more than it computes: worth its hand-over only when longer."""
LEARNING = 0.3
"""Weight of the latest lease in what a row is taken to cost."""

Piece = tuple[int, int, Chunk, list[Any] | None, int]
"""(step, first row, chunk, inputs, bytes of the inputs): ordered by address."""


class SegmentState:
    """One segment's share of the flow: what waits before it, how far it may go."""

    __slots__ = (
        "cpu_ns_per_row",
        "gauge",
        "head",
        "lease_ns",
        "ns_per_row",
        "pieces",
        "prefetch",
        "waiting",
        "workers",
    )

    def __init__(self, head: int, prefetch: int, workers: int, gauge: Gauge) -> None:
        self.head = head
        """Oldest step it has not finished."""
        self.prefetch = prefetch
        """Batches it may work ahead of its reader."""
        self.workers = workers
        self.pieces: list[Piece] = []
        """A heap: rows ready to be worked on."""
        self.waiting = 0
        """Rows in `pieces`."""
        self.lease_ns = LEASE_NS
        self.ns_per_row: float | None = None
        self.cpu_ns_per_row = 0.0
        self.gauge = gauge
        """Rows waiting behind it: for the next segment, or finished for the trainer."""

    def lease_rows(self, rows: int) -> int:
        """How many rows make a lease; one, until the first has told what it costs.

        What pays for the hand-over is CPU time. So rows that mostly wait may make a
        longer lease, as long as all workers still find one in what may be prefetched.
        """
        if self.ns_per_row is None:
            return 1
        per_row = max(self.ns_per_row, 1.0)
        paid = self.lease_ns / max(self.cpu_ns_per_row, 1.0)
        share = self.prefetch * rows // self.workers
        longer = min(paid, PATIENCE_NS / per_row, share)
        return max(1, min(rows, int(max(self.lease_ns / per_row, longer))))

    def window(self, rows: int) -> int:
        """Batches it may be ahead: as asked, and those its workers have in hand."""
        return self.prefetch + self.span(rows) - 1

    def span(self, rows: int) -> int:
        """Batches of so many rows that its workers have in hand at once."""
        return -(-self.workers * self.lease_rows(rows) // rows)

    def learn(self, run_ns: int, cpu_ns: int, rows: int, batch_rows: int = 1) -> bool:
        """Take a settled lease of so many rows into account for the size of the next.

        Returns:
            Whether its workers span more of batches of `batch_rows` than they did.
        """
        before = self.span(batch_rows)
        seen, cpu_seen, known = run_ns / rows, cpu_ns / rows, self.ns_per_row
        if known is None:
            known, self.cpu_ns_per_row = seen, cpu_seen
        self.ns_per_row = known + LEARNING * (seen - known)
        self.cpu_ns_per_row += LEARNING * (cpu_seen - self.cpu_ns_per_row)
        return self.span(batch_rows) > before

    def push(self, piece: Piece) -> None:
        """Let rows wait here."""
        heapq.heappush(self.pieces, piece)
        self.waiting += len(piece[2])

    def pop(self, flight: Flight) -> Piece:
        """Take the earliest rows, as many as make a lease, all of this flight."""
        piece = heapq.heappop(self.pieces)
        wanted = self.lease_rows(len(flight.rows.indices))
        if len(piece[2]) > wanted:
            piece = self._split(piece, wanted)
        else:
            piece = self._join(piece, flight, wanted)
        self.waiting -= len(piece[2])
        return piece

    def _split(self, piece: Piece, wanted: int) -> Piece:
        step, first, chunk, inputs, nbytes = piece
        chunk, rest = chunk.split(wanted)
        kept = nbytes * wanted // (wanted + len(rest))
        left = None if inputs is None else inputs[wanted:]
        heapq.heappush(self.pieces, (step, rest.first_row, rest, left, nbytes - kept))
        taken = None if inputs is None else inputs[:wanted]
        return step, first, chunk, taken, kept

    def _join(self, piece: Piece, flight: Flight, wanted: int) -> Piece:
        """Add the pieces that follow without a gap, while they fit."""
        step, first, chunk, inputs, nbytes = piece
        pieces, stop = self.pieces, first + len(chunk)
        while (
            pieces
            and pieces[0][:2] == (step, stop)
            and stop - first + len(pieces[0][2]) <= wanted
        ):
            _, _, more, more_inputs, more_bytes = heapq.heappop(pieces)
            stop += len(more)
            nbytes += more_bytes
            if inputs is not None and more_inputs is not None:
                inputs = inputs + more_inputs
        if stop - first > len(chunk):
            chunk = flight.chunk(first, stop)
        return step, first, chunk, inputs, nbytes
