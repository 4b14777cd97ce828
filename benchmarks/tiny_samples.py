"""How much does it cost to put tiny samples into batches?

    python benchmarks/tiny_samples.py

The samples are 200,000 times `float32 [32]` and an int, in memory, shuffled, in batches
of 256 and whole epochs. penstock is compared with torch's DataLoader with 0 to 4
workers, kept between epochs, and with a bare loop over `__getitem__`.
"""

from __future__ import annotations

import gc

import numpy as np
from torch.utils.data import DataLoader, Dataset
from versus import show, versus

import penstock as ps

SAMPLES = 200_000
BATCH = 256


class Tiny(Dataset[tuple[np.ndarray, int]]):
    """Rows of one array, and their labels."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.rows = rng.random((SAMPLES, 32), np.float32)
        self.labels = rng.integers(0, 10, SAMPLES).tolist()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.rows[index], self.labels[index]


def main() -> None:
    """Print the table."""
    dataset = Tiny()
    pipe = ps.Pipeline.from_dataset(dataset).shuffle(seed=0).batch(BATCH)
    loaders = {
        f"DataLoader num_workers={workers}": DataLoader(
            dataset,
            BATCH,
            shuffle=True,
            num_workers=workers,
            persistent_workers=workers > 0,
        )
        for workers in range(5)
    }
    order = np.random.default_rng(1).permutation(SAMPLES)

    def bare() -> None:
        for start in range(0, SAMPLES, BATCH):
            indices = order[start : start + BATCH].tolist()
            list(map(dataset.__getitem__, indices))

    def drain(batches: object) -> None:
        for _ in batches:  # type: ignore[attr-defined]
            pass

    candidates = {"penstock": lambda: drain(pipe)}
    for name, loader in loaders.items():
        candidates[name] = lambda loader=loader: drain(loader)
    candidates["bare loop, no batches"] = bare
    gc.freeze()  # the garbage collector may otherwise run in any candidate
    results = versus(candidates, SAMPLES)
    show("tiny samples", results, list(loaders))


if __name__ == "__main__":
    main()
