"""The pipe to a child: objects whole and in order, descriptors, and a clear end."""

from __future__ import annotations

import os
import resource
import threading

import numpy as np
import pytest

from penstock.engine.far.child import Pipe, fork_child
from support.pipes import receive


def test_objects_arrive_whole_and_in_order(ends: tuple[Pipe, Pipe]) -> None:
    ours, theirs = ends
    for message in (1, "two", {"three": [3]}, None):
        ours.send(message)
    assert [receive(theirs) for _ in range(4)] == [1, "two", {"three": [3]}, None]


def test_both_directions_are_independent(ends: tuple[Pipe, Pipe]) -> None:
    ours, theirs = ends
    ours.send("question")
    theirs.send("answer")
    assert (receive(ours), receive(theirs)) == ("answer", "question")


def test_an_object_larger_than_the_pipe_arrives_whole(ends: tuple[Pipe, Pipe]) -> None:
    ours, theirs = ends
    array = np.arange(1 << 20)
    sender = threading.Thread(target=ours.send, args=(array,))
    sender.start()
    received = receive(theirs)
    sender.join()
    assert np.array_equal(received, array)


@pytest.mark.parametrize("started", [b"", b"\0\0\0"], ids=["between", "within"])
def test_the_end_of_the_other_end_is_reported(
    started: bytes, ends: tuple[Pipe, Pipe]
) -> None:
    ours, theirs = ends
    os.write(ours.fileno(), started)
    ours.close()
    with pytest.raises(EOFError):
        receive(theirs)


def test_sending_to_an_end_that_is_gone_is_an_error(ends: tuple[Pipe, Pipe]) -> None:
    ours, theirs = ends
    theirs.close()
    with pytest.raises(EOFError):
        ours.send("anyone?")
    with pytest.raises(EOFError):
        ours.send("here", [0])
    with pytest.raises(EOFError):
        receive(ours)


def test_messages_sent_before_the_end_still_arrive(ends: tuple[Pipe, Pipe]) -> None:
    ours, theirs = ends
    ours.send("last words")
    ours.close()
    assert receive(theirs) == "last words"
    with pytest.raises(EOFError):
        receive(theirs)


def test_a_descriptor_arrives_as_one_of_the_receivers_own(
    ends: tuple[Pipe, Pipe],
) -> None:
    ours, theirs = ends
    reading, writing = os.pipe()
    ours.send("before")
    ours.send("with it", [writing])
    ours.send("after")
    os.close(writing)
    assert receive(theirs) == "before"
    assert receive(theirs) == "with it"
    descriptor = theirs.descriptors.popleft()
    assert receive(theirs) == "after"
    assert not os.get_inheritable(descriptor)
    os.write(descriptor, b"through")
    assert os.read(reading, 20) == b"through"
    os.close(descriptor)
    os.close(reading)


def test_a_descriptor_for_which_there_is_no_room_is_an_error(
    ends: tuple[Pipe, Pipe],
) -> None:
    ours, theirs = ends
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd")))
    spare = [os.dup(ours.fileno())]
    while spare[-1] < used:
        spare.append(os.dup(ours.fileno()))
    ours.send("with it", [ours.fileno()])
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare[-1] + 1, hard))
    try:
        with pytest.raises(OSError, match="raise the limit with `ulimit -n`"):
            receive(theirs)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in spare:
            os.close(descriptor)


def test_everything_that_has_arrived_is_received_at_once(
    ends: tuple[Pipe, Pipe],
) -> None:
    ours, theirs = ends
    for number in range(5):
        ours.send(number)
    assert theirs.receive_all() == [0, 1, 2, 3, 4]
    ours.send("another")
    assert theirs.receive_all() == ["another"]
    ours.send("last")
    ours.close()
    assert theirs.receive_all() == ["last"]
    with pytest.raises(EOFError):
        theirs.receive_all()


def test_an_object_that_cannot_be_pickled_leaves_the_pipe_unchanged(
    ends: tuple[Pipe, Pipe],
) -> None:
    ours, theirs = ends
    with pytest.raises(Exception, match="pickle"):
        ours.send(lambda: None)
    ours.send("still there")
    assert receive(theirs) == "still there"


def test_a_child_keeps_only_its_own_end(ends: tuple[Pipe, Pipe]) -> None:
    ours, theirs = ends
    other, another = Pipe.pair()

    def says() -> None:
        theirs.send([ours.fileno(), other.fileno(), another.fileno()])

    pid = fork_child(says, theirs)
    assert receive(ours) == [-1, -1, -1]
    os.waitpid(pid, 0)
    other.send("not closed here")
    assert receive(another) == "not closed here"
    other.close()
    another.close()
