"""Threads as workers: for functions that wait, or that release the GIL."""

from __future__ import annotations

import logging
import os
import threading
from math import inf

import torch

from ..core.chunk import Lease
from ..core.connector import Connector
from ..core.metrics import WorkerMeter
from ..program.program import Program, Watch
from ..program.randomness import SampleRandom
from ..witness.witness import Witness
from .pool import (
    PoolStatistics,
    Watches,
    WorkerPool,
    beginning,
    join_all,
    no_watch,
    run_lease,
)

LOGGER = logging.getLogger("penstock")
ALONE = (
    "%s: only one thread works on it, whatever num_parallel_workers says: since the"
    ' first sample %s, which threads must not share. Use executor="process", where each'
    " worker opens its own, keep it in a threading.local(), or pass"
    " from_dataset(thread_safe=True) if threads may share it."
)
# Held around a fork: otherwise a child could inherit it locked, without its holder.
_torch_threads = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_torch_threads.acquire,
        after_in_parent=_torch_threads.release,
        after_in_child=_torch_threads.release,
    )


def use_one_torch_thread() -> None:
    """Make torch's operators use this thread alone.

    Rows are processed in parallel already; a pool of threads for each worker would only
    compete. The setting belongs to each thread, but also becomes the default of threads
    that have not used torch yet, so one more thread resets the default. The lock keeps
    two workers from mistaking each other's setting for the default.
    """
    with _torch_threads:
        default = torch.get_num_threads()
        torch.set_num_threads(1)
        restore = threading.Thread(target=torch.set_num_threads, args=(default,))
        restore.start()
        restore.join()


class Threads(WorkerPool):
    """A number of threads, each taking and settling leases.

    The engine lock guards `_wanted`, `_most`, `_asked`, `_surplus` and `_threads`. If
    there is a surplus of threads, the next ones that call `take` retire.

    Args:
        connector: where they take their leases.
        program: what they run.
        seed: seed of the samples' random streams.
        name: name of the segment.
        watch: makes what observes the samples of a thread; it may return None.
    """

    executor = "thread"

    def __init__(
        self,
        connector: Connector,
        program: Program,
        seed: int,
        name: str,
        watch: Watches = no_watch,
    ) -> None:
        self._connector = connector
        self._engine_lock = connector.engine_lock
        self._program = program
        self._seed = seed
        self._name, self._watch = name, watch
        self._sure = not program.doubtful
        self._most = inf if self._sure else 1
        self._wanted = self._asked = 0
        self._surplus = 0
        self._threads: set[threading.Thread] = set()

    def resize(self, count: int) -> None:
        self._adjust(wanted=count)

    def _adjust(self, **changes: float) -> None:
        """Change the requested number, or its bound, and start threads as needed."""
        with self._engine_lock.lock:
            self._wanted = int(changes.get("wanted", self._wanted))
            self._most = changes.get("most", self._most)
            count = int(min(self._wanted, self._most))
            change = count - self._asked
            self._asked = count
            kept = min(self._surplus, max(change, 0))
            self._surplus += max(-change, 0) - kept
            new = [self._make() for _ in range(max(change, 0) - kept)]
            self._threads.update(new)
        for thread in new:
            thread.start()
        if change < 0:
            self._engine_lock.notify(self._connector.segment)

    def retire(self) -> None:
        self.resize(0)

    def close(self, until_s: float = inf) -> list[str]:
        with self._engine_lock.lock:
            threads = list(self._threads)
        return join_all(threads, until_s)

    def statistics(self) -> PoolStatistics:
        with self._engine_lock.lock:
            return PoolStatistics(len(self._threads), beginning(self._connector))

    def threads(self) -> list[str]:
        with self._engine_lock.lock:
            known = [thread.native_id for thread in self._threads]
        return [f"/proc/self/task/{number}" for number in known if number is not None]

    def _make(self) -> threading.Thread:
        return threading.Thread(
            target=self._work, name=f"penstock {self._name}", daemon=True
        )

    def _work(self) -> None:
        use_one_torch_thread()
        meter = self._connector.enter()
        random, watch = SampleRandom(self._seed), self._watch()
        try:
            while self._serve(meter, random, watch):
                pass
        except BaseException as error:  # noqa: BLE001 ours: user code is caught before
            self._engine_lock.fail(error)
        finally:
            self._connector.leave(meter)
            with self._engine_lock.lock:
                self._threads.discard(threading.current_thread())

    def _serve(
        self, meter: WorkerMeter, random: SampleRandom, watch: Watch | None
    ) -> bool:
        """Work on one lease. Keeps no reference between two leases."""
        lease = self._connector.take(meter, self._retires)
        if lease is None:
            return False
        self._run(lease, meter, random, watch)
        return True

    def _run(
        self,
        lease: Lease,
        meter: WorkerMeter,
        random: SampleRandom,
        watch: Watch | None,
    ) -> None:
        witness = None if self._sure else Witness(self._program.doubtful)
        outcome = run_lease(lease, self._program, random, meter.clock, watch)
        if witness is not None:
            self._look(witness)
        self._connector.settle(lease, outcome, meter)

    def _look(self, witness: Witness) -> None:
        """Let others work beside the first thread, if they may share what it used."""
        self._sure = True
        finding = witness.finding()
        if finding is None:
            self._adjust(most=inf)
        else:
            LOGGER.warning(ALONE, self._name, finding)

    def _retires(self) -> bool:
        if self._surplus == 0:
            return False
        self._surplus -= 1
        return True
