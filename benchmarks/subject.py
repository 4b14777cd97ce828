"""A process to measure, which is stopped while another one is measured."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import IO, Any, Self

import psutil

__all__ = ["Ended", "Subject"]

PATIENCE_S = 5.0
"""Seconds to end after its input is closed."""


class Ended(RuntimeError):
    """A subject ended, or did not answer in time."""


class Subject:
    """A fresh process of a script, as a `with`, that answers lines with JSON.

    Between two questions it is stopped, with all its children, so that it neither
    prefetches nor takes a core from another. It does not share cores with host peers:
    those that are stopped leave it all of them.
    """

    def __init__(
        self,
        *arguments: str,
        python: str = sys.executable,
        limit_s: float = 600.0,
        stderr: IO[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it.

        Args:
            *arguments: the script and its arguments.
            python: the interpreter that runs it.
            limit_s: longest time for an answer, in seconds.
            stderr: where its errors go; None: to ours.
            environment: its variables; None: ours.
        """
        self._limit_s = limit_s
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-subject-")
        variables = os.environ if environment is None else environment
        self._process = subprocess.Popen(
            [python, "-W", "ignore", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**variables, "XDG_RUNTIME_DIR": self._folder.name},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let it end by itself, then kill any of its processes that are left."""
        self._signal(signal.SIGCONT)
        family = list(self._family())
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=PATIENCE_S)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.communicate()
        self._folder.cleanup()

    def ask(self, question: str = "") -> Any:
        """Let it run until it has answered; return the answer.

        Raises:
            Ended: it did not answer.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            print(question, file=stdin, flush=True)
        if not select.select([stdout], [], [], self._limit_s)[0]:
            raise Ended(f"no answer to {question!r} after {self._limit_s:.0f} s")
        line = stdout.readline()
        if not line:
            raise Ended(f"ended when asked {question!r}")
        self._signal(signal.SIGSTOP)
        return json.loads(line)

    def pss_mb(self) -> float:
        """Return its memory and that of all its children, shared pages once."""
        total = 0
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_full_info().pss
        return total / 1e6

    def _signal(self, number: signal.Signals) -> None:
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _family(self) -> Iterator[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._process.pid)
            yield process
            yield from process.children(recursive=True)
