"""A worker's end takes frames of any split, descriptors in order, and keeps the GIL."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from penstock.engine.far.child import READ_BYTES, Pipe
from support.pipes import receive

Ends = tuple[Pipe, Pipe]


def test_many_frames_that_come_at_once_are_received_one_by_one(ends: Ends) -> None:
    worker, trainer = ends
    for number in range(100):
        trainer.send(number)
    assert [receive(worker) for _ in range(100)] == list(range(100))


@pytest.mark.parametrize("size", [0, 1, READ_BYTES, 5 * READ_BYTES + 1])
def test_objects_of_any_size_pass_in_both_directions(ends: Ends, size: int) -> None:
    worker, trainer = ends
    message = os.urandom(size)
    thread = threading.Thread(target=trainer.send, args=(message,))
    thread.start()
    assert receive(worker) == message
    thread.join()
    thread = threading.Thread(target=worker.send, args=(message,))
    thread.start()
    assert receive(trainer) == message
    thread.join()


def test_descriptors_come_in_order_with_the_frames_they_belong_to(ends: Ends) -> None:
    worker, trainer = ends
    files = [os.memfd_create(f"file {number}") for number in range(4)]
    for number, file in enumerate(files):
        os.write(file, b"%d" % number)
        trainer.send(number, (file,) if number != 2 else (file, file))
        os.close(file)
    contents = []
    for number in range(4):
        assert receive(worker) == number
        for _ in range(1 + (number == 2)):
            descriptor = worker.descriptors.popleft()
            assert not os.get_inheritable(descriptor)
            contents.append(os.pread(descriptor, 9, 0))
            os.close(descriptor)
    assert contents == [b"0", b"1", b"2", b"2", b"3"]


def test_the_worker_waits_for_what_is_not_there_yet(ends: Ends) -> None:
    worker, trainer = ends
    timer = threading.Timer(0.05, trainer.send, ("late",))
    timer.start()
    assert receive(worker) == "late"
    timer.join()


def test_the_end_of_the_other_end_is_noticed(ends: Ends) -> None:
    worker, trainer = ends
    trainer.send("last")
    trainer.close()
    assert receive(worker) == "last"
    with pytest.raises(EOFError):
        receive(worker)
    with pytest.raises(EOFError):
        worker.send("anybody?")


def test_a_frame_that_breaks_off_is_the_end_too(ends: Ends) -> None:
    worker, trainer = ends
    trainer._socket.sendall(b"\0\0\0")  # noqa: SLF001 half a header
    trainer.close()
    with pytest.raises(EOFError):
        receive(worker)


def test_no_other_thread_runs_while_tasks_are_taken_and_outcomes_sent(
    ends: Ends,
) -> None:
    worker, trainer = ends
    for number in range(200):
        trainer.send(number)
    receive(worker)  # the rest has arrived with it
    begin, ran = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: begin.wait() and ran.set())
    thread.start()
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(60.0)  # from here on it runs only if this thread lets it
    try:
        begin.set()
        for _ in range(199):
            worker.send(receive(worker))
        disturbed = ran.is_set()
    finally:
        sys.setswitchinterval(interval_s)
    thread.join()
    assert not disturbed
