"""What a simulated pipeline does: its stages, its trainer, and the best they could do.

A row of a stage takes `wait_s` on no CPU, `cpu_s` on one, part of that with the GIL,
and `transfer_s` of a store's bandwidth that all its workers share. The more of its
workers are at work, the longer they wait for each other: by Gunther's universal
scalability law, a row takes `1 + contention (n - 1) + crosstalk n (n - 1)` times as
long with `n` of them (N. Gunther, Guerrilla Capacity Planning, 2007).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SimulatedStage:
    """One segment; all times are seconds a row."""

    name: str
    cpu_s: float = 0.0
    wait_s: float = 0.0
    transfer_s: float = 0.0
    """Time of the store's whole bandwidth: `row bytes / bandwidth`."""
    gil: float = 0.0
    """Share of the CPU time, 0 to 1, that holds the GIL of the trainer's process."""
    contention: float = 0.0
    crosstalk: float = 0.0
    most_workers: int = 64
    """1: its rows can only be worked on one after the other."""
    spread: float = 0.1
    """Standard deviation of a row's time, relative."""
    heavy_share: float = 0.0
    """Share of the rows that take `heavy_factor` times as long."""
    heavy_factor: float = 1.0
    movable: bool = False
    """Whether its workers may be processes, which have a GIL each."""
    handover_s: float = 3e-4
    """CPU-seconds that handing a row over from a process takes."""
    row_bytes: float = 1e5
    """Of what it puts out."""

    def queueing_s(self, busy: int) -> float:
        """Seconds a row waits for the other workers, of which so many are at work."""
        beside = busy - 1
        undisturbed_s = self.cpu_s + self.wait_s + self.transfer_s
        return undisturbed_s * beside * (self.contention + self.crosstalk * busy)

    @property
    def mean_factor(self) -> float:
        """What heavy rows make of the mean row."""
        return 1.0 + self.heavy_share * (self.heavy_factor - 1.0)

    @property
    def alone_s(self) -> float:
        """Seconds of a row, on the average, that nothing disturbs."""
        return self.mean_factor * (self.cpu_s + self.wait_s + self.transfer_s)

    def best(self) -> tuple[float, int]:
        """Most rows a second that its own workers can reach, and the fewest for it."""
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
    """Its own part of a step, undisturbed."""
    cores: float = 0.0
    """Cores it keeps busy in that time: none where the work is on a GPU."""
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
    """As the plan announces it; what is not announced has to be noticed."""
    source_bytes: float = 0.0
    """Of a sample as it is read; 0: not known."""

    def best_rows_per_s(self, cores: float) -> float:
        """Rows a second under the best of all settings: the closed-form law.

        The least of what the trainer takes, what each stage alone can reach, and what
        each shared resource (CPU, GIL, a store) has for the sum of all who use it
        (operational analysis: P. Denning and J. Buzen, 1978).
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
