"""How long does a program wait for its first batch?

    python benchmarks/first_batch.py [--rounds 9]

Programs take turns, each in a new process: torch's DataLoader, penstock's with autotune
on, a pipeline with autotune on, and one whose samples are found in a cache on disk.
Printed are the seconds from the start of Python to the first batch, with the imports,
and how many of them come after `import torch`; the medians, and the ratio of the first
to torch's with the same number of workers.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time

PROGRAM = """
import sys, time
import numpy as np
import torch.utils.data as torchs

imported_s = time.time()

class Samples(torchs.Dataset):
    def __len__(self):
        return 2048
    def __getitem__(self, index):
        made = np.random.default_rng(index).random((3, 64, 64), dtype=np.float32)
        return made, index

samples = Samples()
{}
with_workers = {{"batch_size": 64, "shuffle": True, "num_workers": {}}}
for batch in {}:
    print(imported_s, time.time())
    break
"""
OURS = "import penstock as ps; ps.set_enable_autotune(True)"
CACHED = "ps.Pipeline.from_dataset(samples).cache(disk={!r})"
LOADER = "DataLoader(samples, **with_workers)"
PIPELINE = "ps.Pipeline.from_dataset(samples)"
BATCHED = ".shuffle(seed=0).batch(64)"


def spent_s(program: str) -> tuple[float, float]:
    """Return the seconds to the first batch: of all, and after torch's import."""
    begun_s = time.time()
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    imported_s, there_s = map(float, run.stdout.split())
    return there_s - begun_s, there_s - imported_s


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cached_source = CACHED.format(folder)
        programs = {
            "torch, 0 workers": PROGRAM.format("", 0, "torchs." + LOADER),
            "torch, 2 workers": PROGRAM.format("", 2, "torchs." + LOADER),
            "penstock, 0 workers": PROGRAM.format(OURS, 0, "ps." + LOADER),
            "penstock, 2 workers": PROGRAM.format(OURS, 2, "ps." + LOADER),
            "a pipeline": PROGRAM.format(OURS, 0, PIPELINE + BATCHED),
            "a cached pipeline": PROGRAM.format(OURS, 0, cached_source + BATCHED),
        }
        fills = f"import penstock as ps; [*{cached_source}.batch(64)]"
        spent_s(PROGRAM.format(fills, 0, "[0]"))
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
        for _ in range(options.rounds):
            for name, program in programs.items():
                times[name].append(spent_s(program))
    middle = {
        name: [statistics.median(column) for column in zip(*pairs, strict=True)]
        for name, pairs in times.items()
    }
    for name, (whole_s, after_s) in middle.items():
        workers = 2 if "2" in name else 0
        ratio = whole_s / middle[f"torch, {workers} workers"][0]
        print(
            f"  {name:<20} {whole_s:5.2f} s {ratio:5.2f}x   {after_s:5.2f} s of them"
            " after torch's import"
        )


if __name__ == "__main__":
    main()
