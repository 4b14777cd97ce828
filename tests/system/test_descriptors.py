"""The file that was read is found while other threads open and close theirs."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from penstock.system.descriptors import read_places, read_since


def test_the_file_that_was_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "read.bin"
    path.write_bytes(bytes(1000))
    with path.open("rb", buffering=0) as file:
        before = read_places()
        assert read_since(before) == ()
        file.read(10)
        (read_file,) = read_since(before)
        assert read_file.path == str(path)
        assert read_file.is_open
    assert not read_file.is_open


def test_files_may_be_closed_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "closed.bin"
    path.write_bytes(bytes(1000))
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            descriptor = os.open(path, os.O_RDONLY)
            os.read(descriptor, 10)
            os.close(descriptor)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        paths = {file.path for _ in range(1000) for file in read_since({})}
        until_s = time.monotonic() + 20  # on a busy machine they hardly run
        while str(path) not in paths and time.monotonic() < until_s:
            paths |= {file.path for file in read_since({})}
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert str(path) in paths
