"""How fast are rows of a Parquet file batched, beside a loop written for it by hand?

    python benchmarks/tables.py [--rows 2000000]

A table has 40 columns of float32 and a label, in row groups of 10,000, which are random
numbers. Both shuffle windows of 16 row groups and make batches of 1,024. The loop by
hand reads the groups of a window at once, stacks the columns and takes rows; it makes
one tensor of the numbers. The pipeline makes a tensor of each column, of float64, as
torch does of Python's floats. A second loop by hand makes these, too. Epochs take
turns, five of each; the first is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

import penstock as ps

COLUMNS = [f"f{at}" for at in range(40)]
GROUP, WINDOW, BATCH, EPOCHS = 10_000, 16, 1024, 5


def write(path: Path, rows: int) -> None:
    """Write the table."""
    rng = np.random.default_rng(0)
    columns = {name: rng.random(rows, np.float32) for name in COLUMNS}
    labels = rng.integers(0, 10, rows)
    pq.write_table(pa.table({**columns, "label": labels}), path, row_group_size=GROUP)


def as_tensors(*arrays: NDArray[Any]) -> list[torch.Tensor]:
    """Return the tensors of a batch, one of all floats and one of the labels."""
    return [*map(torch.from_numpy, arrays)]


def by_column(x: NDArray[np.float32], y: NDArray[np.int64]) -> dict[str, torch.Tensor]:
    """Return the tensors of a batch as the pipeline does, each in its own memory."""
    values = torch.from_numpy(x).T.double()
    columns = dict(zip(COLUMNS, map(torch.clone, values.unbind()), strict=True))
    return {**columns, "label": torch.from_numpy(y)}


def by_hand(path: Path, make: Callable[..., object]) -> int:
    """Make the batches of an epoch; return their rows."""
    file, rng, rows = pq.ParquetFile(path), np.random.default_rng(0), 0
    order = rng.permutation(file.num_row_groups)
    for at in range(0, len(order), WINDOW):
        table = file.read_row_groups(sorted(order[at : at + WINDOW].tolist()))
        x = np.stack([table[name].to_numpy() for name in COLUMNS], 1)
        y = table["label"].to_numpy()
        places = rng.permutation(len(y))
        for first in range(0, len(y), BATCH):
            few = places[first : first + BATCH]
            make(x[few], y[few])
            rows += len(few)
    return rows


def rate(epoch: Callable[[], int]) -> float:
    """Return the rows a second of an epoch."""
    begun_s = time.perf_counter()
    return epoch() / (time.perf_counter() - begun_s)


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.parquet"
        write(path, options.rows)
        source = ps.Pipeline.from_parquet(str(path))
        with source.shuffle(seed=0, window=WINDOW).batch(BATCH) as pipe:
            both: dict[str, Callable[[], int]] = {
                "by hand": lambda: by_hand(path, as_tensors),
                "by column": lambda: by_hand(path, by_column),
                "penstock": lambda: sum(len(batch["label"]) for batch in pipe),
            }
            rates: dict[str, list[float]] = {name: [] for name in both}
            for _ in range(EPOCHS + 1):
                for name, epoch in both.items():
                    rates[name].append(rate(epoch))
    middle = {name: statistics.median(speeds[1:]) for name, speeds in rates.items()}
    for name, speed in middle.items():
        print(f"  {name:<10} {speed:>12,.0f} rows/s {speed / middle['by hand']:6.2f}x")


if __name__ == "__main__":
    main()
