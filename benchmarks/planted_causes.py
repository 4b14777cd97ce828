"""Is what slows training named rightly, and does the advice help?

    python benchmarks/planted_causes.py
    python benchmarks/planted_causes.py --only lock,cache

Twenty pipelines and loaders have one planted cause each, and some of them once more
with worker processes. Every one trains untuned, in a process of its own. Then the
advice of `explain()` is followed to the letter in another process, except the advice to
tune: that is the last line. Advice should make training 1.2 times as fast, and at most
as much faster as it says; where nothing would, there should be none.
"""

from __future__ import annotations

import argparse
import atexit
import io
import json
import logging
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from burning import burn, rounds_for
from PIL import Image

import penstock as ps

FREE_S = 1.0
"""How long a trainer with nothing to load is measured."""
PASTED_S, TUNED_S = 6.0, 20.0
"""How long each run trains; the second half counts."""
TUNE = "ps.set_enable_autotune(True)"
GAIN = 1.2
OFF = 1.5
"""Times as much as promised that a run may gain: two runs differ by themselves."""
BATCH = 16
ROW = np.random.default_rng(0).random((64, 64)).astype("float32")
NUMBERS = np.random.default_rng(1).random(20_000)
MS = rounds_for(0.001)


class Data:
    """Sample i is what `read` makes of i."""

    def __init__(
        self, read: Callable[[int], Any] = lambda _: ROW, samples: int = 4000
    ) -> None:
        self.read, self.samples = read, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        return self.read(index)


def waits(seconds: Callable[[int], float], samples: int = 4000) -> Data:
    """Return data whose sample i waits for so long."""

    def read(index: int) -> Any:
        time.sleep(seconds(index))
        return ROW

    return Data(read, samples)


def spread(index: int) -> float:
    return 0.01 * random.Random(index).lognormvariate(0.0, 0.7)


def sort(sample: Any) -> Any:
    """Compute for three milliseconds without the GIL."""
    end_s = time.thread_time() + 0.003
    while time.thread_time() < end_s:
        np.sort(NUMBERS)
    return sample


def python(sample: Any) -> Any:
    """Compute for three milliseconds with the GIL."""
    burn(3 * MS)
    return sample


def slow_collate(rows: list[Any]) -> Any:
    return torch.tensor([row.tolist() for row in rows])


def many_threads(sample: Any) -> Any:
    torch.set_num_threads(16)
    product = torch.from_numpy(np.resize(ROW, (384, 384)))
    for _ in range(6):
        product = torch.relu(product @ product) * 0.01
    return sample


LOCK = threading.Lock()


def locked(_: int) -> Any:
    with LOCK:
        time.sleep(0.004)
    return ROW


class Crowded:
    """A store that is fastest with five readers: each more slows all of them down."""

    def __init__(self) -> None:
        self.inside = 0

    def __call__(self, _: int) -> Any:
        self.inside += 1
        beside = self.inside - 1
        time.sleep(0.01 * (1.0 + 0.05 * beside * beside))
        self.inside -= 1
        return ROW


Made = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True)
class Plant:
    """A planted cause."""

    make: Made
    """Return the pipeline, given the settings of its slow stage."""
    causes: tuple[str, ...]
    """How the right sentence begins."""
    stage: str | None
    """What is to blame, by its short name; None if it is the trainer."""
    step_s: float = 0.005
    step: Callable[[], object] | None = None
    """What the trainer does in a step besides waiting."""
    first: tuple[str, ...] = ()
    """What the program itself sets."""


def reading(data: Data, **settings: Any) -> Made:
    return lambda more: ps.Pipeline.from_dataset(data, **settings | more).batch(BATCH)


def mapping(function: Callable[[Any], Any], **settings: Any) -> Made:
    return lambda more: (
        ps.Pipeline.from_dataset(Data()).map(function, **settings | more).batch(BATCH)
    )


def cached(more: dict[str, Any]) -> ps.Pipeline:
    source = ps.Pipeline.from_dataset(waits(lambda _: 0.005), num_parallel_workers=2)
    few = source.take(1000)  # so that the second epoch begins soon
    return few.cache(ram=more.get("ram", "4MB")).batch(BATCH)


def loading(data: Data, **settings: Any) -> Made:
    """Return a loader of torch's face, which penstock loads though it is not tuned."""
    settings = {"batch_size": BATCH, "sample_seeding": True, **settings}
    return lambda more: ps.DataLoader(data, **{**settings, **more})


def photographs(more: dict[str, Any]) -> ps.Pipeline:
    """Decode whole photographs, and crop them; or as the advice says."""
    folder = tempfile.mkdtemp(prefix="planted-")
    atexit.register(shutil.rmtree, folder)
    smooth = np.linspace(0, 255, 375 * 500 * 3).reshape(375, 500, 3).astype("uint8")
    (Path(folder) / "all").mkdir()
    for number in range(200):
        Image.fromarray(smooth).save(f"{folder}/all/{number}.jpg", quality=90)
    files = ps.Pipeline.from_folder(folder)
    crop = ps.image.random_resized_crop(224)
    whole = files.map(whole_photograph, name="decode").map(crop)
    return more.get("stages", lambda _: whole)(files).batch(BATCH)


def whole_photograph(sample: Any) -> Any:
    content, label = sample
    return np.asarray(Image.open(io.BytesIO(content))), label


def collating(_: dict[str, Any]) -> ps.Pipeline:
    return ps.Pipeline.from_dataset(Data()).batch(BATCH, collate_fn=slow_collate)


def launches() -> None:
    """Launch many small operations, as a trainer does that drives a device."""
    tensor = torch.zeros(4)
    for _ in range(1000):
        tensor = tensor + 1.0


def launches_alone() -> None:
    """Do the same for longer, with one thread, on the first two cores."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    for _ in range(8):
        launches()


def computes() -> None:
    """Train on the cores, with a thread for each."""
    product = torch.rand(512, 512)
    for _ in range(4):
        product = torch.relu(product @ product) * 0.001


WAITS, CPU = ("waiting",), ("CPU",)
PLANTS: dict[str, Plant] = {
    "slow reads": Plant(reading(waits(lambda _: 0.02)), WAITS, "Data"),
    "slow store": Plant(reading(waits(spread)), WAITS, "Data"),
    "gil": Plant(mapping(python), ("the GIL", "loading slows", *CPU), "python"),
    "collate": Plant(collating, ("collate", *CPU), "Batch(ID:1)"),
    "cpu": Plant(mapping(sort), CPU, "sort"),
    "torch threads": Plant(
        mapping(many_threads, executor="process", num_parallel_workers=2),
        CPU,
        "many_threads",
    ),
    "uneven": Plant(
        reading(waits(lambda i: 0.3 if i % 25 == 7 else 0.002)),
        ("uneven", *WAITS),
        "Data",
        0.05,
    ),
    "straggler": Plant(
        reading(
            waits(lambda i: 0.5 if i % 100 == 7 else 0.001), num_parallel_workers=4
        ),
        ("uneven",),
        "Data",
        0.04,
    ),
    "budget": Plant(
        reading(
            Data(lambda _: (time.sleep(0.05), np.zeros((512, 512), np.float32))[1]),
            num_parallel_workers=32,
        ),
        ("the memory budget",),
        "Data",
        first=('ps.set_memory_budget("24MB")',),
    ),
    "prefetch": Plant(
        reading(waits(lambda i: 0.25 if i % 320 == 0 else 0.0003)),
        ("uneven",),
        "Data",
        0.02,
        first=("ps.set_prefetch_size(1)",),
    ),
    "lock": Plant(
        reading(Data(locked), executor="thread", num_parallel_workers=8),
        ("a lock",),
        "Data",
    ),
    "crowded": Plant(
        reading(Data(Crowded()), thread_safe=True, num_parallel_workers=2),
        WAITS,
        "Data",
    ),
    "cache": Plant(cached, WAITS, "Data"),
    "loader": Plant(loading(waits(lambda _: 0.02), num_workers=2), WAITS, "Data"),
    "gil of a loader": Plant(
        loading(Data(lambda _: python(ROW)), num_workers=2, thread_safe=True),
        ("the GIL", "loading slows", *CPU),
        "Data",
    ),
    "photographs": Plant(photographs, CPU, "decode", 0.002),
    "trainer": Plant(reading(waits(lambda _: 0.002)), ("the trainer",), None, 0.1),
    "gil of the trainer": Plant(
        mapping(python, executor="thread", num_parallel_workers=2),
        ("loading slows", "the GIL", "contention"),
        stage=None,
        step_s=0.001,
        step=launches,
    ),
    "cores of the trainer": Plant(
        mapping(sort, num_parallel_workers=2),
        ("loading slows", *CPU),
        stage=None,
        step_s=0.0,
        step=computes,
    ),
}
RANKS = Plant(
    mapping(sort, num_parallel_workers=2),
    ("loading slows", *CPU),
    stage=None,
    step_s=0.0,
    step=launches_alone,
)
"""One of two ranks, whose trainers launch operations all the time."""


APART = ("slow reads", "cpu", "uneven", "straggler")
"""Those that are trained with worker processes, too."""
IN_PROCESSES = 'executor="process"'

# One run, in a process of its own


def be(name: str, advice: list[str]) -> None:
    """Train one plant with this advice, and print what was seen as JSON."""
    plant, settings = PLANTS.get(name, RANKS), {}
    logging.getLogger("penstock").setLevel(logging.ERROR)
    for line in (*plant.first, *advice):
        code = line.partition("  #")[0]
        names = {"ps": ps, "torch": torch, "DataLoader": dict}
        if code.startswith(("ps.", "torch.")):
            exec(code, names)  # noqa: S102 as a user pastes it
        elif code.startswith("."):
            settings["stages"] = eval(f"lambda pipe: pipe{code}", names)  # noqa: S307
        else:
            call = code if code.startswith("DataLoader(") else f"dict({code})"
            settings |= eval(call, names)  # noqa: S307 the same
    seconds = TUNED_S if TUNE in advice else PASTED_S
    begun_s, steps = time.perf_counter(), 0
    while (passed_s := time.perf_counter() - begun_s) < FREE_S:
        train(plant)
        steps += 1
    free = steps * BATCH / passed_s
    pipe = plant.make(settings)
    begun_s, counts = time.perf_counter(), [0, 0]
    for _ in forever(pipe):
        train(plant)
        passed_s = time.perf_counter() - begun_s
        counts[passed_s > seconds / 2] += BATCH
        if passed_s > seconds:
            break
    explanation = pipe.explain()
    rate = counts[1] / (seconds / 2)
    figures = {
        "rate": rate,
        "cause": explanation.cause,
        "stage": explanation.bottleneck,
    }
    figures |= {"times": explanation.headspace, "truly": free / rate}
    print(
        json.dumps({**figures, "line": explanation.line, "advice": explanation.advice}),
        flush=True,
    )
    pipe.close()


def train(plant: Plant) -> None:
    """Do what the trainer does in a step, besides waiting for a batch."""
    time.sleep(plant.step_s)
    if plant.step is not None:
        plant.step()


def forever(pipe: Any) -> Iterator[Any]:
    while True:
        yield from pipe


# All of them

PROMISED = re.compile(r"at most ([\d.]+)x faster")


def begun(name: str, *advice: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--be", name, *advice]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, **pipes)


def run(name: str, *advice: str) -> Any:
    return ended(begun(name, *advice))


def ended(process: subprocess.Popen[str]) -> Any:
    output, errors = process.communicate()
    lines = output.splitlines()
    if not lines:
        sys.exit(errors)
    return json.loads(lines[-1])


def two_ranks(*settings: str) -> list[str]:
    """Return the causes that two ranks name beside each other."""
    both = [begun("ranks", *settings) for _ in range(2)]
    return [ended(process)["cause"] for process in both]


def told_rightly(plant: Plant, figures: Any) -> bool:
    stage = figures["stage"]
    blamed = stage is None if plant.stage is None else plant.stage in (stage or "")
    if plant.stage is None and plant.step is not None:
        blamed = True  # what lengthens the trainer's own part is no stage
    return blamed and figures["cause"].startswith(plant.causes)


def followed(name: str, *settings: str) -> str:
    """Train a plant, then with the advice it gets; return what is wrong, or nothing."""
    plant, figures = PLANTS[name], run(name, *settings)
    about = f"{name}{', in processes' if settings else ''}"
    report = (
        f"{figures['rate']:,.0f} samples/s\n    {figures['line']}"
        f" Truly {figures['truly']:.1f}x."
        f"\n    cause: {figures['cause']}"
    )
    print(f"{about}: {report}", flush=True)
    wrong = "" if told_rightly(plant, figures) else f"{about}: {report}"
    advice = [line for line in figures["advice"] if not line.startswith(TUNE)]
    if advice:
        most = max(float(PROMISED.findall(line)[-1]) for line in advice)
        rate = run(name, *settings, *advice)["rate"]
        times = rate / figures["rate"]
        gain = f"{'; '.join(advice)}: {rate:,.0f}, {times:.2f} times as fast"
        print(f"    try: {gain}", flush=True)
        as_promised = GAIN <= times <= OFF * most
        wrong = wrong or ("" if as_promised else f"{about}: {report}\n    {gain}")
    return wrong


def tuned(name: str) -> bool:
    """Train a plant with the tuner, and print what it made of it."""
    figures = run(name, TUNE)
    truth = f"Truly {figures['truly']:.1f}x."
    print(f"    tuned: {figures['rate']:,.0f}\n    {figures['line']} {truth}")
    print(f"    cause: {figures['cause']}", flush=True)
    return told_rightly(PLANTS[name], figures) or figures["line"].startswith(
        "not input"
    )


def names(text: str) -> list[str]:
    return text.split(",")


def main() -> None:
    """Print all of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=names, default=list(PLANTS))
    parser.add_argument("--be", nargs="+", help="be one of those, with this advice")
    options = parser.parse_args()
    if options.be:
        be(options.be[0], options.be[1:])
        return
    wrong = []
    for name in options.only:
        wrong.append(followed(name))
        if name in APART:
            wrong.append(followed(name, IN_PROCESSES))
        if not tuned(name):
            print("    which is not what was planted")
    if len(options.only) == len(PLANTS):
        print("two ranks:", *two_ranks(), sep="\n    ")
    right = wrong.count("")
    print(f"\n{right} of {len(wrong)} are right", *filter(None, wrong), sep="\n")


if __name__ == "__main__":
    main()
