"""A mailbox never waits; whole objects arrive in order whatever the other end does."""

from __future__ import annotations

import os
import select
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.engine.far.child import Pipe
from penstock.engine.far.handover import dumps
from support.pipes import receive

LARGE = bytes(3 << 20)
"""More bytes than fit into the pipe at once."""


def test_an_object_that_fits_is_sent_at_once(ends: tuple[Pipe, Pipe]) -> None:
    ours, theirs = ends
    ours.post(dumps("one"))
    ours.post(dumps(2))
    assert not ours.unsent
    assert (receive(theirs), receive(theirs)) == ("one", 2)


def test_posting_to_an_end_that_does_not_read_does_not_wait(
    ends: tuple[Pipe, Pipe],
) -> None:
    ours, _ = ends
    for _ in range(3):
        ours.post(dumps(LARGE))
    assert ours.unsent


def test_objects_that_had_no_room_follow_in_order_with_descriptors(
    ends: tuple[Pipe, Pipe],
) -> None:
    ours, theirs = ends
    reading, writing = os.pipe()
    ours.post(dumps(LARGE))
    ours.post(dumps("with it"), [writing])
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(lambda: [receive(theirs), receive(theirs)])
        while ours.unsent:
            select.select([], [ours], [])
            ours.flush()
        assert received.result() == [LARGE, "with it"]
    os.write(theirs.descriptors[0], b"through")
    assert os.read(reading, 20) == b"through"
    os.close(writing)
    os.close(reading)


def test_large_objects_are_read_as_they_come(ends: tuple[Pipe, Pipe]) -> None:
    ours, theirs = ends
    messages = []
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(lambda: [theirs.send(LARGE), theirs.send("small")])
        while len(messages) < 2:
            select.select([ours], [], [])
            messages += ours.collect()
        future.result()
    assert messages == [LARGE, "small"]


def test_an_empty_pipe_is_not_the_end(ends: tuple[Pipe, Pipe]) -> None:
    ours, _ = ends
    assert ours.collect() == []


def test_half_an_object_waits_for_its_rest(ends: tuple[Pipe, Pipe]) -> None:
    ours, theirs = ends
    theirs.send("whole")
    whole = ours._socket.recv(1000)  # noqa: SLF001 taken off, to be sent in halves
    os.write(theirs.fileno(), whole[:7])
    assert ours.collect() == []
    os.write(theirs.fileno(), whole[7:])
    assert ours.collect() == ["whole"]


def test_the_last_messages_arrive_before_the_end(ends: tuple[Pipe, Pipe]) -> None:
    ours, theirs = ends
    theirs.send("last")
    theirs.close()
    assert ours.collect() == ["last"]
    with pytest.raises(EOFError):
        ours.collect()
    with pytest.raises(EOFError):
        ours.post(dumps("anyone?"))
