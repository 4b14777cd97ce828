"""The process in which one peer loads. It answers each line of JSON with another line.

    python -m peers.serve PEER WORKLOAD FOLDER      (in the peer's environment)

- `{"do": "settings"}`: the rows of the table, each with the settings to try; or why
  the peer is left out.
- `{"do": "open", "setting": {...}, "keep": PATH}`: end what was open, make a loader of
  this setting and take its first batch, which is kept as an array; seconds taken.
- `{"do": "window", "settle_s": s, "seconds": s}`: load, and measure the last seconds:
  samples, seconds and CPU seconds of all its processes.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from versus import cpu_s

from .data import BATCH, Given, main_part

__all__ = ["Server"]

DECODED = 32
"""Number of photographs on which decoders are compared."""
TAIL = 300
"""Characters of an error."""


class Server:
    """Loads one workload with one peer."""

    def __init__(self, peer: str, workload: str, given: Given) -> None:
        self._module = importlib.import_module(f".{peer}", __package__)
        self._workload, self._given = workload, given
        self._batches: Iterator[Any] = iter(())

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out a request, and return the answer, which may be an error."""
        try:
            answer = getattr(self, request.pop("do"))(**request)
        except Exception as error:  # noqa: BLE001 - the table says so
            return {"error": f"{type(error).__name__}: {error}"[:TAIL]}
        assert isinstance(answer, dict)
        return answer

    def settings(self) -> dict[str, Any]:
        """Return the settings of each row."""
        left_out = getattr(self._module, "LEFT_OUT", {}).get(self._workload)
        if left_out:
            return {"left_out": left_out}
        return {"rows": self._module.SETTINGS[self._workload]}

    def open(self, setting: dict[str, Any], keep: str = "") -> dict[str, Any]:
        """Start a loader with another setting."""
        self.close()
        start_s = time.perf_counter()
        self._batches = getattr(self._module, self._workload)(self._given, **setting)
        batch = next(self._batches)
        first_s = time.perf_counter() - start_s
        if keep:
            np.save(keep, main_part(batch))
        return {"first_s": first_s}

    def window(self, settle_s: float, seconds: float) -> dict[str, Any]:
        """Measure the loader that is open."""
        self._load(settle_s)
        start_s, cpu = time.perf_counter(), cpu_s()
        count = self._load(seconds)
        spent_s = time.perf_counter() - start_s
        samples = count * BATCH[self._workload]
        return {"samples": samples, "seconds": spent_s, "cpu_s": cpu_s() - cpu}

    def decoder(self) -> dict[str, Any]:
        """Return how a decoder of the peer's own differs from Pillow's, at most."""
        decode = getattr(self._module, "decode", None)
        if decode is None:
            return {"differs": None}
        from PIL import Image

        most = 0
        for path in self._given.paths[:DECODED]:
            with Image.open(path) as image:
                pixels = np.asarray(image).astype(np.int16)
            peer_pixels = decode(Path(path).read_bytes()).astype(np.int16)
            most = max(most, int(np.abs(peer_pixels - pixels).max()))
        return {"differs": most}

    def close(self) -> None:
        """End the loader that is open."""
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()

    def _load(self, seconds: float) -> int:
        end_s, count = time.perf_counter() + seconds, 0
        while not count or time.perf_counter() < end_s:
            next(self._batches)
            count += 1
        return count


def main() -> None:
    """Answer until the input ends."""
    # Libraries may print; their output must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer, workload, folder = sys.argv[1:]
    server = Server(peer, workload, Given.read(Path(folder)))
    for line in sys.stdin:
        print(json.dumps(server.answer(json.loads(line))), file=answers, flush=True)
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(0)  # the interpreter's own shutdown takes longer than a window


if __name__ == "__main__":
    main()
