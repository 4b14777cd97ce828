"""How many samples a second do Ray actors make, and does the tuner find their number?

    python benchmarks/ray_actors.py [--actors 4] [--seconds 5]

Each sample sleeps 20 ms in an actor, so actors need no cores of their own. Ray is
started on this machine with room for `--actors`. Printed: the rate of each fixed number
of actors, and of the number that the tuner settles on, after `--warm` seconds.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import ray

import penstock as ps

SLEEP_S = 0.02


def sleepy(sample: int) -> int:
    time.sleep(SLEEP_S)
    return sample


def rate(workers: Any, warm_s: float, seconds: float) -> tuple[float, int]:
    """Return the samples a second after so long, and the actors by then."""
    pipe = ps.Pipeline.from_dataset(range(1 << 20), executor="inline")
    pipe = pipe.map(sleepy, executor="ray", num_parallel_workers=workers)
    with pipe.batch(10) as loading:
        batches = iter(loading)
        begun_s = time.monotonic()
        while time.monotonic() - begun_s < warm_s:
            next(batches)
        begun_s, rows = time.monotonic(), 0
        while time.monotonic() - begun_s < seconds:
            rows += len(next(batches))
        stats = loading.stats()
        assert stats is not None
        (actors,) = [s for s in stats.segments if s.executor == "ray"]
        return rows / (time.monotonic() - begun_s), actors.num_parallel_workers


def main() -> None:
    """Print a row for each number of actors, and one for the tuner's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--actors", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--warm", type=float, default=18.0)
    options = parser.parse_args()
    ray.init("local", num_cpus=options.actors, include_dashboard=False)
    for actors in range(1, options.actors + 1):
        fixed, _ = rate(actors, 6.0, options.seconds)
        print(f"{actors} actors: {fixed:.0f} samples/s")
    ps.set_enable_autotune(True)
    tuned_rate, actors = rate((1, 64), options.warm, options.seconds)
    print(f"tuned: {tuned_rate:.0f} samples/s with {actors} actors")
    ray.shutdown()


if __name__ == "__main__":
    main()
