"""The thirty workloads of ordinary.py: data as people have it, made from fixed seeds.

Each is a dataset as people write it for torch's DataLoader. It declares what is slow,
so that verdicts can be checked. Epochs are long, because the rows repeat.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
import tarfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from burning import burn, rounds_for
from PIL import Image
from suite_rows import photograph
from tiny_samples import Tiny
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, IterableDataset, get_worker_info

__all__ = ["WORKLOADS", "Workload"]

EPOCH = 1 << 20
"""Samples of the datasets that have a length."""
WORDS = [f"word{number}" for number in range(40)]
MS = int(os.environ.get("PENSTOCK_BENCH_MS") or rounds_for(0.001))
"""Rounds of Python in 1 ms, the same for all compared processes."""
os.environ["PENSTOCK_BENCH_MS"] = str(MS)

Slow = Literal["read", "collate", "trainer"]

COMPUTES, WAITS = ("CPU", "the GIL"), ("waiting",)
ITERATED = (*COMPUTES, "torch's own workers load", "the trainer itself loads")
"""Causes for an iterable; penstock's DataLoader cannot be more precise."""


@dataclass(frozen=True)
class Workload:
    """One dataset, how it is batched, and what is known about it."""

    make: Callable[[Path], Any]
    """Return the dataset, given the folder with the files that `write` made."""
    batch: int
    slow: tuple[Slow, ...]
    """The stages that hold training up; several if there is no single one."""
    causes: tuple[str, ...] = ("",)
    """Possible beginnings of the right cause of `explain()`."""
    collate: Callable[[list[Any]], Any] | None = None
    write: Callable[[Path], None] | None = None
    """Make the files in the workload's folder."""
    shuffle: bool = True
    step_s: float = 0.0
    """The trainer's own part of a step, which it spends waiting for a device."""
    needs: str = ""
    """A package that the row needs; without it, the row is left out."""

    @property
    def left_out(self) -> str:
        """Why it cannot be measured here; empty if it can."""
        there = not self.needs or importlib.util.find_spec(self.needs)
        return "" if there else f"{self.needs} is not installed"


class Rows(Dataset[Any], ABC):
    """Sample i is `row(i % count)`."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int) -> Any:
        return self.row(index % self.count)

    @abstractmethod
    def row(self, index: int) -> Any:
        """Return one of the rows."""


class Listed(Rows):
    """Rows in memory, as Python objects."""

    def __init__(self, rows: list[Any]) -> None:
        super().__init__(len(rows))
        self.rows = rows

    def row(self, index: int) -> Any:
        return self.rows[index]


def generator() -> np.random.Generator:
    return np.random.default_rng(19)


# Text


def token_lists(_: Path) -> Any:
    """Return lists of 10 to 200 token ids, with a label."""
    draw = generator()
    lengths = draw.integers(10, 200, 4000)
    return Listed([(draw.integers(0, 30_000, n).tolist(), n % 2) for n in lengths])


def pad(rows: list[Any]) -> dict[str, torch.Tensor]:
    """Make a batch of the longest row's width."""
    ids = [torch.tensor(ids) for ids, _ in rows]
    return {
        "ids": pad_sequence(ids, batch_first=True),
        "mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "label": torch.tensor([label for _, label in rows]),
    }


def sentences(_: Path) -> Any:
    """Return strings of 60 words."""
    draw = generator()
    return Listed([" ".join(draw.choice(WORDS, 60)) for _ in range(4000)])


@cache
def tokenizer() -> Any:
    """Return this process's tokenizer, made on first use."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    numbers = {word: number for number, word in enumerate(("[PAD]", *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="[PAD]"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_padding()
    return tokenizer


def tokenized(rows: list[str]) -> torch.Tensor:
    """Tokenize a whole batch at once, in native code."""
    return torch.tensor([encoding.ids for encoding in tokenizer().encode_batch(rows)])


def write_tokens(folder: Path) -> None:
    generator().integers(0, 50_000, 5_000_000, np.uint16).tofile(folder / "tokens")


class TokenBlocks(Rows):
    """Blocks of one long text, from a memory map, as language models are trained."""

    def __init__(self, folder: Path) -> None:
        self.tokens = np.memmap(folder / "tokens", np.uint16, "r")
        super().__init__(len(self.tokens) - 513)

    def row(self, index: int) -> Any:
        start = index * 4_391 % self.count
        block = torch.from_numpy(self.tokens[start : start + 513].astype(np.int64))
        return block[:-1], block[1:]


def write_lines(folder: Path) -> None:
    draw = generator()
    with open(folder / "rows.csv", "w") as file:
        for number in range(40_000):
            values = draw.random(8).round(4)
            print(number, *values, sep=",", file=file)


class CsvLines(IterableDataset[Any]):
    """Lines of one file, which workers read in turn."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "rows.csv"

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        mine, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        with open(self.path) as file:
            for number, line in enumerate(file):
                if number % workers == mine:
                    label, *values = line.split(",")
                    yield torch.tensor(list(map(float, values))), int(label)


# Tables


def table_rows(_: Path) -> Any:
    """Return rows of a table, as dicts of Python numbers and strings."""
    draw = generator()
    return Listed(
        [
            {f"f{k}": float(x) for k, x in enumerate(draw.random(20))}
            | {f"c{k}": int(x) for k, x in enumerate(draw.integers(0, 99, 6))}
            for _ in range(4000)
        ]
    )


def write_parquet(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    draw = generator()
    columns: dict[str, Any] = {f"f{k}": draw.random(40_000) for k in range(8)}
    columns["label"] = draw.integers(0, 10, 40_000)
    pa.parquet.write_table(pa.table(columns), folder / "p", row_group_size=2000)


class ArrowRows(Rows):
    """Rows of an Arrow table, as dicts of Python numbers."""

    def __init__(self, folder: Path) -> None:
        import pyarrow.parquet

        self.table = pyarrow.parquet.read_table(folder / "p").combine_chunks()
        super().__init__(len(self.table))

    def row(self, index: int) -> Any:
        return self.table.slice(index, 1).to_pylist()[0]


class ParquetRows(Rows):
    """Rows of a Parquet file, read in order; the latest row group is kept."""

    def __init__(self, folder: Path) -> None:
        super().__init__(40_000)
        self.path = folder / "p"
        self.file: Any = None
        self.kept: tuple[int, Any] = (-1, None)

    def row(self, index: int) -> Any:
        import pyarrow.parquet

        number, offset = divmod(index, 2000)
        if self.file is None:
            self.file = pyarrow.parquet.ParquetFile(self.path)
        if self.kept[0] != number:
            group = self.file.read_row_group(number).to_pydict()
            self.kept = number, group
        return {name: values[offset] for name, values in self.kept[1].items()}


def hugging_face(_: Path) -> Any:
    """Return token ids and a label, as a Hugging Face dataset of tensors."""
    import datasets

    draw = generator()
    ids = draw.integers(0, 30_000, (5000, 64))
    dataset = datasets.Dataset.from_dict({"ids": ids, "label": ids[:, 0] % 10})
    return datasets.concatenate_datasets([dataset] * 50).with_format("torch")


def hugging_face_iterable(_: Path) -> Any:
    """Return the same, to be read in order, in four parts."""
    import datasets

    draw = generator()
    ids = draw.integers(0, 30_000, (20_000, 64))
    dataset = datasets.Dataset.from_dict({"ids": ids, "label": ids[:, 0] % 10})
    return dataset.to_iterable_dataset(num_shards=4).with_format("torch")


# Images, sound, graphs


class Detection(Rows):
    """Images, each with its own number of boxes."""

    def __init__(self, _: Path) -> None:
        super().__init__(400)
        draw = generator()
        self.images = torch.from_numpy(draw.integers(0, 255, (400, 3, 96, 96), "u1"))
        self.boxes = [
            torch.from_numpy(draw.random((k % 9 + 1, 4), np.float32))
            for k in range(400)
        ]

    def row(self, index: int) -> Any:
        boxes = self.boxes[index]
        labels = torch.ones(len(boxes), dtype=torch.int64)
        return self.images[index].float() / 255, {"boxes": boxes, "labels": labels}


def listed(rows: list[Any]) -> Any:
    """Keep samples as they are, for detection models."""
    return tuple(zip(*rows, strict=True))


def write_photographs(folder: Path) -> None:
    with Image.open(io.BytesIO(photograph())) as whole:
        for number in range(40):
            small = whole.crop((number, number, number + 400, number + 300))
            small.save(folder / f"{number}.jpg", quality=90)


class Photographs(Rows):
    """JPEG files, decoded and resized by Pillow."""

    def __init__(self, folder: Path) -> None:
        super().__init__(40)
        self.paths = [folder / f"{number}.jpg" for number in range(40)]

    def row(self, index: int) -> Any:
        with Image.open(self.paths[index]) as image:
            pixels = np.asarray(image.convert("RGB").resize((128, 128)))
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy()), index


def write_audio(folder: Path) -> None:
    generator().integers(-9999, 9999, 20_000_000, np.int16).tofile(folder / "audio")


class Audio(Rows):
    """Seconds of sound, from a memory map."""

    def __init__(self, folder: Path) -> None:
        super().__init__(1000)
        self.sound = np.memmap(folder / "audio", np.int16, "r")

    def row(self, index: int) -> Any:
        second = self.sound[index * 19_990 : index * 19_990 + 16_000]
        return second.astype(np.float32) / 32_768, index % 10


def graphs(_: Path) -> Any:
    """Return graphs: features of nodes, edges, a label."""
    draw = generator()
    nodes = draw.integers(10, 60, 2000)
    return Listed(
        [
            {
                "x": torch.from_numpy(draw.random((n, 16), np.float32)),
                "edges": torch.from_numpy(draw.integers(0, n, (2, 3 * n))),
                "y": float(n),
            }
            for n in nodes
        ]
    )


def joined(rows: list[Any]) -> dict[str, torch.Tensor]:
    """Join several graphs into one: edges are shifted by the nodes before them."""
    counts = torch.tensor([len(row["x"]) for row in rows])
    starts = counts.cumsum(0) - counts
    edges = [row["edges"] + start for row, start in zip(rows, starts, strict=True)]
    return {
        "x": torch.cat([row["x"] for row in rows]),
        "edges": torch.cat(edges, dim=1),
        "y": torch.tensor([row["y"] for row in rows]),
        "graph": torch.arange(len(rows)).repeat_interleave(counts),
    }


def nested(_: Path) -> Any:
    """Return dicts of dicts of small tensors, as robots and games make them."""
    draw = generator()

    def sample() -> Any:
        parts = torch.from_numpy(draw.random((6, 12), np.float32))
        return {
            "seen": {"arm": parts[0], "eye": {"left": parts[1], "right": parts[2]}},
            "done": [parts[3], {"force": parts[4]}],
            "reward": float(parts[5, 0]),
        }

    return Listed([sample() for _ in range(4000)])


# Files of many rows


def write_h5(folder: Path) -> None:
    import h5py

    with h5py.File(folder / "h5", "w") as file:
        file["x"] = generator().random((8000, 256), np.float32)


class H5Rows(Rows):
    """Rows of an HDF5 file, opened in each process."""

    def __init__(self, folder: Path) -> None:
        super().__init__(8000)
        self.path = folder / "h5"
        self.rows: Any = None

    def row(self, index: int) -> Any:
        if self.rows is None:
            import h5py

            self.rows = h5py.File(self.path)["x"]
        return self.rows[index], index


def write_records(folder: Path) -> None:
    generator().random(4_000 * 1024, np.float32).tofile(folder / "records")


class Records(Rows):
    """Records of one file, found by seeking; each process opens it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(4000)
        self.path = folder / "records"
        self.file: Any = None

    def row(self, index: int) -> Any:
        if self.file is None:
            self.file = open(self.path, "rb")  # noqa: SIM115 kept as long as the dataset
        self.file.seek(index * 4096)
        return np.frombuffer(self.file.read(4096), np.float32).copy(), index


def write_shards(folder: Path) -> None:
    draw = generator()
    for shard in range(8):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(600):
                array = io.BytesIO()
                np.save(array, draw.random(256, np.float32))
                label = json.dumps(number % 10).encode()
                for suffix, data in ((".npy", array.getvalue()), (".cls", label)):
                    info = tarfile.TarInfo(f"{shard}-{number:05}{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


def web_dataset(folder: Path) -> Any:
    """Return arrays and labels of eight tar files."""
    import webdataset

    shards = [str(folder / f"{number}.tar") for number in range(8)]
    dataset = webdataset.WebDataset(shards, shardshuffle=False)
    return dataset.decode().to_tuple("npy", "cls")


# Sizes, delays, habits


def vectors(width: int, count: int, _: Path) -> Any:
    """Return the rows of one array, as separate tensors."""
    rows = torch.from_numpy(generator().random((count, width), np.float32))
    return Listed(list(rows))


class Timed(Rows):
    """Slow samples; sample i is i.

    Args:
        wait_s: seconds of waiting.
        rounds: rounds of Python.
        heavy: factor for both, in one sample of a hundred.
    """

    def __init__(
        self, _: Path, *, wait_s: float = 0.0, rounds: int = 0, heavy: int = 1
    ) -> None:
        super().__init__(EPOCH)
        self.wait_s, self.rounds, self.heavy = wait_s, rounds, heavy

    def row(self, index: int) -> Any:
        times = self.heavy if index % 100 == 7 else 1
        if self.wait_s:
            time.sleep(self.wait_s * times)
        burn(self.rounds * times)
        return index


def collate_python(rows: list[int]) -> torch.Tensor:
    """Spend 20 ms on a batch, with the GIL held."""
    burn(20 * MS)
    return torch.tensor(rows)


BLOCK = bytes(1 << 20)


def collate_native(rows: list[int]) -> torch.Tensor:
    """Spend some 10 ms on a batch in native code, which releases the GIL."""
    for _ in range(12):
        hashlib.sha256(BLOCK)
    return torch.tensor(rows)


class Caching(Rows):
    """Keeps each sample once it is made."""

    def __init__(self, _: Path) -> None:
        super().__init__(500)
        self.kept: dict[int, torch.Tensor] = {}

    def row(self, index: int) -> Any:
        if index not in self.kept:
            burn(MS)
            self.kept[index] = torch.full((64,), float(index))
        return self.kept[index]


class Vectorised(Rows):
    """Reads the rows of a whole batch from one array at once."""

    def __init__(self, _: Path) -> None:
        super().__init__(100_000)
        self.rows = generator().random((100_000, 64), np.float32)

    def row(self, index: int) -> Any:
        return self.rows[index]

    def __getitems__(self, indices: list[int]) -> Any:
        return list(self.rows[np.asarray(indices) % self.count])


WORKLOADS = {
    "text_padding": Workload(token_lists, 64, ("collate",), collate=pad),
    "text_tokenized": Workload(
        sentences, 64, ("collate",), collate=tokenized, needs="tokenizers"
    ),
    "token_blocks": Workload(
        TokenBlocks, 32, ("read", "collate"), COMPUTES, write=write_tokens
    ),
    "csv_iterable": Workload(
        CsvLines, 64, ("read",), ITERATED, write=write_lines, shuffle=False
    ),
    "table_rows": Workload(table_rows, 64, ("collate",)),
    "arrow_rows": Workload(
        ArrowRows, 64, ("read",), COMPUTES, write=write_parquet, needs="pyarrow"
    ),
    "parquet_rows": Workload(
        ParquetRows,
        64,
        ("read", "collate"),
        (*COMPUTES, "collate"),
        write=write_parquet,
        shuffle=False,
        needs="pyarrow",
    ),
    "hf_map": Workload(hugging_face, 64, ("read",), COMPUTES, needs="datasets"),
    "hf_iterable": Workload(
        hugging_face_iterable, 64, ("read",), ITERATED, shuffle=False, needs="datasets"
    ),
    "detection": Workload(Detection, 8, ("read", "collate"), collate=listed),
    "pil_images": Workload(
        Photographs, 16, ("read",), COMPUTES, write=write_photographs
    ),
    "audio_memmap": Workload(
        Audio, 32, ("read", "collate"), COMPUTES, write=write_audio
    ),
    "graphs": Workload(graphs, 32, ("collate",), collate=joined),
    "nested_dicts": Workload(nested, 64, ("collate",)),
    "h5py_rows": Workload(
        H5Rows, 32, ("read",), COMPUTES, write=write_h5, needs="h5py"
    ),
    "seeks_one_file": Workload(
        Records, 32, ("read", "collate"), COMPUTES, write=write_records
    ),
    "webdataset": Workload(
        web_dataset,
        32,
        ("read",),
        ITERATED,
        write=write_shards,
        shuffle=False,
        needs="webdataset",
    ),
    "tiny_samples": Workload(lambda _: Tiny(), 256, ("read", "collate")),
    "small_batches": Workload(partial(vectors, 1, 4000), 2, ("read", "collate")),
    "large_batches": Workload(partial(vectors, 64, 50_000), 4096, ("read", "collate")),
    "getitems": Workload(Vectorised, 512, ("read", "collate")),
    "caching": Workload(Caching, 64, ("read", "collate")),
    "slow_read": Workload(partial(Timed, wait_s=0.005), 16, ("read",), WAITS),
    "gil_bound": Workload(partial(Timed, rounds=MS), 16, ("read",), COMPUTES),
    "wait_and_compute": Workload(
        partial(Timed, wait_s=0.004, rounds=MS), 16, ("read",), WAITS + COMPUTES
    ),
    "stragglers": Workload(
        partial(Timed, wait_s=0.001, heavy=50), 16, ("read",), WAITS
    ),
    "collate_python": Workload(Timed, 32, ("collate",), collate=collate_python),
    "collate_native": Workload(Timed, 32, ("collate",), collate=collate_native),
    "slow_trainer": Workload(
        table_rows, 16, ("trainer",), ("the trainer",), step_s=0.010
    ),
    "trainer_of_images": Workload(
        Photographs,
        8,
        ("trainer",),
        ("the trainer",),
        write=write_photographs,
        step_s=0.050,
    ),
}
