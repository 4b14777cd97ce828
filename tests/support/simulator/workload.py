"""The work of a simulated pipeline: its stages, its trainer, and their best speed.

A row of a stage takes `wait_s` without a CPU, `cpu_s` on one (a part of that with the
GIL), and `transfer_s` of the bandwidth of a store that all workers of the stage share.
The more workers are busy, the longer they wait for each other. By Gunther's universal
scalability law, a row takes `1 + contention (n - 1) + crosstalk n (n - 1)` times as
long with `n` workers (N. Gunther, Guerrilla Capacity Planning, 2007).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SimulatedStage:
    """One segment; all times are seconds per row."""

    name: str
    cpu_s: float = 0.0
    wait_s: float = 0.0
    transfer_s: float = 0.0
    """Time for which a row takes all of the store: `row bytes / bandwidth`."""
    gil: float = 0.0
    """Share of the CPU time, 0 to 1, that holds the GIL of the trainer's process."""
    contention: float = 0.0
    crosstalk: float = 0.0
    most_workers: int = 64
    """Most workers; 1 if its rows can only be worked on one after another."""
    spread: float = 0.1
    """Standard deviation of a row's time, relative."""
    heavy_share: float = 0.0
    """Share of the rows that take `heavy_factor` times as long."""
    heavy_factor: float = 1.0
    movable: bool = False
    """Whether its workers may be processes, which have a GIL each."""
    handover_s: float = 3e-4
    """CPU seconds to hand over a row from a process."""
    row_bytes: float = 1e5
    """Bytes of a row in its output."""

    def queueing_s(self, busy: int) -> float:
        """Return the seconds a row waits for other workers when `busy` are at work."""
        beside = busy - 1
        undisturbed_s = self.cpu_s + self.wait_s + self.transfer_s
        return undisturbed_s * beside * (self.contention + self.crosstalk * busy)

    @property
    def mean_factor(self) -> float:
        """The factor by which heavy rows lengthen the mean time of a row."""
        return 1.0 + self.heavy_share * (self.heavy_factor - 1.0)

    @property
    def alone_s(self) -> float:
        """Mean seconds of a row that nothing slows down."""
        return self.mean_factor * (self.cpu_s + self.wait_s + self.transfer_s)

    def best(self) -> tuple[float, int]:
        """Return the most rows per second it can reach, and the workers it takes."""
        rates = [
            (n / (self.alone_s + self.mean_factor * self.queueing_s(n)), -n)
            for n in range(1, self.most_workers + 1)
        ]
        rate, count = max(rates)
        return rate, -count


@dataclass(frozen=True, slots=True)
class Trainer:
    """Takes a batch, computes, and takes the next."""

    gap_s: float
    """Its own part of a step, if nothing slows it down."""
    cores: float = 0.0
    """Cores it keeps busy in that time; 0 if the work is on a GPU."""
    gil: float = 0.0
    """Share of that time that holds the GIL."""
    spread: float = 0.02


@dataclass(frozen=True, slots=True)
class Workload:
    """A whole pipeline and its trainer."""

    stages: tuple[SimulatedStage, ...]
    trainer: Trainer
    batch_rows: int = 32
    regime: str = ""
    """The regime that the plan announces. Empty: the tuner must notice a change."""
    source_bytes: float = 0.0
    """Bytes of a sample as it is read; 0: unknown."""

    def best_rows_per_s(self, cores: float) -> float:
        """Return the rows per second under the best settings, in closed form.

        This is the smallest of the trainer's own speed, the speed that each stage can
        reach alone, and the speed at which a shared resource (CPU, GIL, a store) is
        fully used (operational analysis: P. Denning and J. Buzen, 1978).
        """
        rows, trainer = self.batch_rows, self.trainer
        bounds = [stage.best()[0] for stage in self.stages]
        if trainer.gap_s > 0:
            bounds.append(rows / trainer.gap_s)
        cpu_s = [stage.mean_factor * stage.cpu_s for stage in self.stages]
        gil_s = [s * stage.gil for s, stage in zip(cpu_s, self.stages, strict=True)]
        demands = [
            (cores, sum(cpu_s) + trainer.gap_s * trainer.cores / rows),
            (1.0, sum(gil_s) + trainer.gap_s * trainer.gil / rows),
            *((1.0, stage.mean_factor * stage.transfer_s) for stage in self.stages),
        ]
        bounds += [capacity / need for capacity, need in demands if need > 0]
        return min(bounds)
