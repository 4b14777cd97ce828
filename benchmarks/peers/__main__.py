"""How fast are other loaders on the same data, each at the best of several settings?

    cd benchmarks && ../.venv/bin/python -m peers --quick [--data DIR] [--resume FILE]

The peers are torch (Pillow and simplejpeg), torchdata, Grain, SPDL, tf.data, MindSpore
and FFCV. Each has an environment of its own, which is made first and kept
(environments.py); if it cannot be installed, the table says why. The workloads are
photographs (random resized crops, the same parts for all peers that accept a part),
tiny samples made by Python, the same rows from arrays, lists of token ids that are
padded, images with lists of boxes, and reads that wait 20 ms and compute 1 ms of
Python. Samples come in order. First batches are compared with penstock's, and rows with
other pixels are not used as a measure for ours.

First, each setting is measured briefly. Then the best setting of each row runs in turn
with all others of its workload, which are stopped in between: medians of five windows.
Memory is the proportional set size (PSS) of all processes, the most after any window. A
workload is appended to a file as soon as it is measured; `--resume FILE` continues.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
from pathlib import Path

from .bench import FULL, QUICK, Bench, add_rows, read_rows, report
from .data import BATCH
from .environments import DEFAULT, PEERS
from .prepare import prepare

TITLES = {
    "photographs": "photographs: decode, random resized crop 224, flip, batch 64",
    "tiny": "tiny: float32 [32] and an int from __getitem__, batch 256",
    "arrays": "arrays: the same rows, each by its own way to take many, batch 256",
    "text": "text: lists of 10 to 200 token ids, padded, batch 64",
    "detection": "detection: float32 [3, 96, 96] and boxes, in lists of 16",
    "waits": "waits: 20 ms of waiting and 1 ms of Python a sample, batch 32",
}
assert TITLES.keys() == BATCH.keys()


def names(text: str) -> list[str]:
    """Return the workloads or peers of a list."""
    if unknown := set(parts := text.split(",")) - TITLES.keys() - PEERS.keys():
        raise argparse.ArgumentTypeError(f"no such name: {', '.join(unknown)}")
    return parts


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="20 minutes in all")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folders of JPEGs")
    parser.add_argument("--most", type=int, default=500, help="photographs of it")
    parser.add_argument("--only", type=names, default=list(TITLES), metavar="NAME,...")
    parser.add_argument("--peers", type=names, default=list(PEERS), metavar="NAME,...")
    parser.add_argument("--envs", type=Path, default=DEFAULT, metavar="DIR")
    parser.add_argument("--resume", type=Path, metavar="FILE")
    options = parser.parse_args()
    # If it is ended from outside, it ends the processes that it stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    path = options.resume or Path(tempfile.mkstemp(".jsonl", "peers-")[1])
    print(f"rows are added to {path}", flush=True)
    there = read_rows(path)
    with tempfile.TemporaryDirectory() as folder:
        given = prepare(Path(folder), options.data, options.most)
        pace = QUICK if options.quick else FULL
        bench = Bench(given, options.envs, options.peers, pace)
        for workload in options.only:
            if workload not in there:
                add_rows(path, rows := bench.measure(workload))
                report(rows, TITLES[workload])
    print("\n-- all of them --")
    for workload, rows in read_rows(path).items():
        report(rows, TITLES[workload])


if __name__ == "__main__":
    main()
