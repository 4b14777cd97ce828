"""How fast does a ResNet train on photographs, beside other loaders?

    python benchmarks/train_on_gpu.py --data DIR [--model resnet18] [--seconds 15]

It needs a CUDA device and torchvision, and class folders of photographs: few are
enough, as each epoch goes over all of them often. torchvision's ResNet trains in
bfloat16 with batches of 256, and each step ends with `loss.item()`. Photographs are
decoded, cropped, resized to 224 and flipped. Each row trains in a process of its own,
and its first seconds do not count. Printed are images a second, and the trainer's own
part of a step: from a batch's arrival on the device to the next call for one.

"Cores alone" runs the crop operator in as many processes as there are cores, and
makes no batches. SPDL has a row where it and simplejpeg are installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain, repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils.data as torchs

import penstock as ps
from penstock.pipeline.image.geometry import random_box
from penstock.pipeline.sources.folder import Folder

BATCH, SIZE, CLASSES = 256, 224, 1000
CORES = len(os.sched_getaffinity(0))
EPOCH = 1 << 18
"""Images in an epoch: photographs are repeated."""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Options(NamedTuple):
    """What each row needs."""

    data: Path
    model: str
    settled_s: float
    seconds: float
    workers: int


class Trained(NamedTuple):
    """What one row saw."""

    rate: float
    """Images a second."""
    own_s: float = 0.0
    """The trainer's own part of a step: the median; 0: nothing was trained."""
    verdict: str = ""


def trained(batches: Iterable[Any], options: Options) -> Trained:
    """Train on batches that are on the device, `uint8 [N, H, W, 3]` or normalised."""
    import torchvision

    torch.backends.cudnn.benchmark = True
    model = torchvision.models.get_model(options.model).cuda()
    model = model.to(memory_format=torch.channels_last)
    optimiser = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    mean, std = (torch.tensor(v, device="cuda").view(1, 3, 1, 1) for v in (MEAN, STD))
    own: list[float] = []
    begin_s, start = time.perf_counter(), 0.0
    for images, labels in batches:
        arrived = time.perf_counter()
        if not start and arrived - begin_s > options.settled_s:
            start = arrived
        if images.dtype == torch.uint8:
            images = (images.permute(0, 3, 1, 2) / 255 - mean) / std  # noqa: PLW2901
        inputs = images.contiguous(memory_format=torch.channels_last)
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        loss.item()
        now = time.perf_counter()
        if start:
            own.append(now - arrived)
            if now - start > options.seconds:
                break
    return Trained(len(own) * BATCH / (now - start), statistics.median(own))


def on_device(batches: Iterable[Any]) -> Iterator[Any]:
    """Copy pinned batches to the device, as a training loop does by hand, in epochs."""
    for images, labels in chain.from_iterable(repeat(batches)):
        yield images.to("cuda", non_blocking=True), labels.to("cuda", non_blocking=True)


def device_alone(options: Options) -> Trained:
    """Train on one batch that is on the device."""
    images = torch.randint(0, 256, (BATCH, SIZE, SIZE, 3), dtype=torch.uint8)
    labels = torch.randint(0, CLASSES, (BATCH,))
    return trained(repeat((images.cuda(), labels.cuda())), options)


def decode_for(options: Options, first: int) -> float:
    """Decode photographs one after another; return how many a second."""
    torch.set_num_threads(1)
    folder = Folder.scan(options.data)
    decode = ps.image.decode_random_resized_crop(SIZE, flip=0.5)
    rng = np.random.default_rng(first)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < options.seconds:
        decode(folder[(first + count) % len(folder)], rng=rng)
        count += 1
    return count / (time.perf_counter() - start)


def cores_alone(options: Options) -> Trained:
    """Decode in one process a core, and do nothing else."""
    with ProcessPoolExecutor(CORES, get_context("fork")) as pool:
        rates = pool.map(partial(decode_for, options), range(CORES))
        return Trained(sum(rates))


class Photographs(torchs.Dataset[Any]):
    """What a user of torchvision writes: `float32 [3, 224, 224]`, normalised."""

    def __init__(self, data: Path) -> None:
        from torchvision.datasets import ImageFolder
        from torchvision.transforms import v2

        self.folder = ImageFolder(
            data,
            v2.Compose(
                [
                    v2.RandomResizedCrop(SIZE, antialias=True),
                    v2.RandomHorizontalFlip(),
                    v2.ToImage(),
                    v2.ToDtype(torch.float32, scale=True),
                    v2.Normalize(MEAN, STD),
                ]
            ),
        )

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int) -> Any:
        return self.folder[index % len(self.folder)]


def of_torch(options: Options) -> Trained:
    """Train on torch's DataLoader."""
    settings: Any = {"pin_memory": True, "persistent_workers": True}
    loader = torchs.DataLoader(
        Photographs(options.data),
        BATCH,
        shuffle=True,
        num_workers=options.workers,
        **settings,
    )
    return trained(on_device(loader), options)


def of_our_loader(options: Options) -> Trained:
    """Train on the same program with penstock's DataLoader, from its defaults."""
    ps.set_enable_autotune(True)
    dataset = Photographs(options.data)
    loader = ps.DataLoader(dataset, BATCH, shuffle=True, pin_memory=True)
    result = trained(on_device(loader), options)
    return result._replace(verdict=loader.explain().line)


def of_pipeline(options: Options, **stage: Any) -> Trained:
    """Train on a pipeline whose decoding runs with these settings."""
    photographs = ps.Pipeline.from_folder(options.data).shuffle(seed=0).repeat(1000)
    crop = ps.image.decode_random_resized_crop(SIZE, flip=0.5)
    with photographs.map(crop, **stage).batch(BATCH).to_device("cuda") as pipe:
        return trained(pipe, options)._replace(verdict=pipe.explain().line)


def tuned(options: Options) -> Trained:
    """Train on the pipeline as it tunes itself, from its defaults."""
    ps.set_enable_autotune(True)
    return of_pipeline(options)


def by_hand(options: Options) -> Trained:
    """Train on the pipeline with processes that decode, and no tuner."""
    return of_pipeline(
        options, executor="process", num_parallel_workers=options.workers
    )


def of_spdl(options: Options) -> Trained:
    """Train on SPDL: whole batches on threads, by simplejpeg and cv2."""
    import cv2
    import simplejpeg
    from spdl.pipeline import PipelineBuilder

    cv2.setNumThreads(1)
    folder = Folder.scan(options.data)

    def batch_of(number: int) -> Any:
        rng = np.random.default_rng(number)
        images = np.empty((BATCH, SIZE, SIZE, 3), np.uint8)
        labels = np.empty(BATCH, np.int64)
        for row, at in enumerate(rng.integers(len(folder), size=BATCH)):
            content, labels[row] = folder[int(at)]
            whole = simplejpeg.decode_jpeg(bytes(content))
            box = random_box(*whole.shape[:2], (0.08, 1.0), (3 / 4, 4 / 3), rng)
            part = whole[box.top :, box.left :][: box.height, : box.width]
            part = cv2.resize(part, (SIZE, SIZE), interpolation=cv2.INTER_AREA)
            images[row] = part[:, ::-1] if rng.random() < 0.5 else part
        return torch.from_numpy(images).pin_memory(), torch.from_numpy(labels)

    builder = PipelineBuilder().add_source(range(1 << 30))
    builder = builder.pipe(batch_of, concurrency=options.workers, output_order="input")
    built = builder.add_sink(3).build(num_threads=options.workers + 1)
    with built.auto_stop():
        return trained(on_device(built.get_iterator()), options)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="class folders")
    parser.add_argument("--model", default="resnet18", help="a name of torchvision's")
    parser.add_argument("--seconds", type=float, default=15.0, help="what counts")
    parser.add_argument("--settled", type=float, default=15.0, help="what does not")
    parser.add_argument("--workers", type=int, default=max(1, CORES - 2))
    parser.add_argument(
        "--rows", default="", help="parts of names, with commas between"
    )
    parser.add_argument("--row", default="", help="train on this one, here")
    arguments = parser.parse_args()
    options = Options(
        arguments.data,
        arguments.model,
        arguments.settled,
        arguments.seconds,
        arguments.workers,
    )
    rows: dict[str, Callable[[Options], Trained]] = {
        "the device alone": device_alone,
        "cores alone": cores_alone,
        f"DataLoader, torchvision, {options.workers} workers": of_torch,
        "penstock.DataLoader, the same": of_our_loader,
        "Pipeline, crop operator, tuned": tuned,
        f"the same by hand, {options.workers} processes": by_hand,
    }
    if importlib.util.find_spec("spdl") and importlib.util.find_spec("simplejpeg"):
        rows[f"SPDL, simplejpeg, {options.workers} threads"] = of_spdl
    if arguments.row:
        result = rows[arguments.row](options)
        own = f"own part of a step {result.own_s * 1e3:5.1f} ms" if result.own_s else ""
        print(f"  {arguments.row:<40} {result.rate:>8,.0f}/s  {own}  {result.verdict}")
        return
    parts = arguments.rows.split(",")
    print(f"{options.model}, {CORES} cores", flush=True)
    for name in rows:
        if any(part in name for part in parts):
            subprocess.run([sys.executable, *sys.argv, "--row", name], check=True)


if __name__ == "__main__":
    main()
