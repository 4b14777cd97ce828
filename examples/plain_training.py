"""An ordinary training script that does not mention penstock.

    python examples/plain_training.py
    penstock run examples/plain_training.py

Each read waits for 2 ms, as on a shared disk, and each image is augmented.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIZE = 32
CLASSES = 10


class Photos(Dataset[tuple[torch.Tensor, int]]):
    """Random images that are slow to read."""

    def __init__(self, length: int, wait_s: float) -> None:
        self.images = torch.rand(256, 3, SIZE, SIZE)
        self.length = length
        self.wait_s = wait_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.wait_s)
        image = self.images[index % len(self.images)]
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image, index % CLASSES


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--wait-ms", type=float, default=2.0)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = Photos(options.samples, options.wait_ms / 1000)
    loader = DataLoader(data, batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(options.epochs):
        start = time.perf_counter()
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        spent_s = time.perf_counter() - start
        print(
            f"epoch {epoch}: loss {loss.item():.3f},"
            f" {options.samples / spent_s:.0f} samples/s"
        )


if __name__ == "__main__":
    main()
