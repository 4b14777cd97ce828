"""Whatever happens to the tiers, they return what would be computed."""

# ruff: noqa: SLF001 what cannot be brought about from outside is done inside

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from penstock.cache import folder as folder_module
from penstock.cache.cache import Cache, Here
from penstock.cache.disk import Disk
from penstock.cache.folder import folder_in
from penstock.cache.record import RecordError, check
from support.forked import End, forked
from support.tiers import Computing, a_cache

SAMPLES = 12
SIZES = (8, 16, 24)
"""Records of about 0.3, 0.9 and 1.9 KB."""
INDEX = st.integers(0, SAMPLES - 1)
SIZE = st.sampled_from(SIZES)
SOME = st.lists(st.tuples(INDEX, SIZE), min_size=1, max_size=8)

Sample = tuple[int, int]
"""A sample's index and image size."""
EMPTY_BYTES = 2 * 4096
"""The bytes of an empty database."""


@pytest.fixture(autouse=True)
def _alone(own_runtime_folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        folder_module, "RESTING_S", -1.0
    )  # idle namespaces may go at once


def whole(record: bytes | memoryview | None, key: bytes) -> bool:
    """Return whether that is an undamaged record."""
    try:
        check(record or b"", key)
    except RecordError:
        return False
    return True


class TiersMachine(RuleBasedStateMachine):
    """One job's cache, with workers and other jobs that come and are killed."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.cache: Cache | None = None
        self.in_ram: set[Sample] = set()
        self.on_disk: set[Sample] = set()
        """The samples that may be stored, at most."""
        self.lookups = self.unsure = 0
        """Lookups since it was opened: in all, and by processes that were killed."""

    @initialize(
        ram=st.sampled_from([0, 3_000, 12_000, 60_000]),
        limit=st.sampled_from([0, 40_000, 100_000]),
        has_disk=st.booleans(),
    )
    def begin(self, ram: int, limit: int, *, has_disk: bool) -> None:
        self.ram, self.limit = ram, limit
        self.disk = self.folder / "disk" if has_disk else None
        self.open()

    # What the machine does

    def fresh(self) -> Cache:
        return a_cache(self.disk, ram=self.ram, limit=self.limit)

    def open(self) -> None:
        self.cache = self.fresh()
        self.cache.open()
        self.ask = Computing(self.cache)
        self.lookups = self.unsure = 0
        self.in_ram.clear()

    def close(self) -> None:
        assert self.cache is not None
        self.cache.close()

    @property
    def here(self) -> Here:
        assert self.cache is not None
        assert self.cache._here is not None
        return self.cache._here

    def may_be_stored(self, sample: Sample) -> None:
        if self.ram:
            self.in_ram.add(sample)
        if self.disk is not None:
            self.on_disk.add(sample)

    def is_held(self, sample: Sample) -> bool:
        """Return whether it is stored now, and is not to be computed once more."""
        key = self.ask.cache.fingerprint.key(*sample)
        if not self.here.trusts(key[:8]):
            return False
        arena, disk = self.here.arena, self.here.disk
        if arena is not None and whole(arena.get(key), key):
            return True
        return disk is not None and whole(disk.get(key), key)

    def get(self, sample: Sample) -> None:
        hit = self.is_held(sample)
        must = sample not in self.in_ram | self.on_disk
        before = self.ask.computed
        assert self.ask.right(*sample)
        times = self.ask.computed - before
        assert not (hit and times), f"{sample} was stored, and was computed"
        assert not (must and not times), f"{sample} was not stored, and was found"
        self.lookups += 1
        self.may_be_stored(sample)

    # What may happen

    @rule(some=SOME)
    def ask_for_some(self, some: list[Sample]) -> None:
        for sample in some:
            self.get(sample)

    @rule(asked=st.tuples(INDEX, SIZE))
    def ask_again(self, asked: Sample) -> None:
        self.get(asked)
        self.get(asked)

    @rule(size=SIZE, epochs=st.integers(1, 2))
    def ask_for_all_of_another_size(self, size: int, epochs: int) -> None:
        for _ in range(epochs):
            for index in range(SAMPLES):
                self.get((index, size))

    @rule()
    def reopen(self) -> None:
        self.close()
        self.open()

    @rule(some=SOME, told=st.integers(0, 8))
    def a_worker_is_killed(self, some: list[Sample], told: int) -> None:
        """The child shares the counters, too."""
        assert self.cache is not None
        self.kill(Computing(self.cache), some, told)
        told = min(told, len(some))
        self.lookups += told
        self.unsure += len(some) - told

    @rule(some=SOME, told=st.integers(0, 8))
    def another_job_is_killed(self, some: list[Sample], told: int) -> None:
        self.kill(Computing(self.fresh()), some, told)

    @rule(some=SOME, told=st.integers(0, 8))
    def the_last_job_is_killed(self, some: list[Sample], told: int) -> None:
        self.close()
        self.in_ram.clear()
        self.kill(Computing(self.fresh()), some, told)
        self.open()

    def kill(self, ask: Computing, some: list[Sample], reports: int) -> None:
        """Have a child ask, and kill it once it has reported this many."""

        def work(end: End) -> None:
            ask.cache.open()
            for sample in some:
                end.tell("right" if ask.right(*sample) else f"{sample} is wrong")
            end.hear()

        with forked(work) as child:
            for sample in some[:reports]:
                assert child.hear() == "right"
                self.may_be_stored(sample)
        for sample in some:
            self.may_be_stored(sample)

    # No preconditions: what is stored by now depends on how fast writers were, and the
    # next example must be drawn in the same way.

    @rule(which=st.integers(0, 99), byte=st.integers(0, 10_000), flip=st.integers(1, 7))
    def damage_in_ram(self, which: int, byte: int, flip: int) -> None:
        if not self.in_ram:
            return
        sample = sorted(self.in_ram)[which % len(self.in_ram)]
        arena = self.here.arena
        assert arena is not None
        _, begin, length = arena._find(self.ask.cache.fingerprint.key(*sample))
        if length:
            arena._memory[begin + byte % length] ^= 1 << flip
            self.in_ram.discard(sample)

    @rule(which=st.integers(0, 99), byte=st.integers(0, 10_000), flip=st.integers(1, 7))
    def damage_on_disk(self, which: int, byte: int, flip: int) -> None:
        """Do it between two runs: some records of this one are still on their way."""
        if not self.on_disk:
            return
        sample = sorted(self.on_disk)[which % len(self.on_disk)]
        key = self.ask.cache.fingerprint.key(*sample)
        self.close()
        disk = Disk(self.here_folder)
        record = disk.get(key)
        if record is not None:
            record[byte % len(record)] ^= 1 << flip
            with disk._env.begin(write=True) as txn:
                txn.put(key, bytes(record))
            self.on_disk.discard(sample)
        disk.close()
        self.open()

    @property
    def here_folder(self) -> Path:
        disk = self.ask.cache.opening.disk
        assert disk is not None
        return folder_in(disk)

    # What always holds

    @invariant()
    def each_sample_asked_for_was_found_or_computed(self) -> None:
        if self.cache is None:
            return
        counts = self.here.counters.totals()
        settled = counts.ram_hits + counts.disk_hits + counts.misses
        assert self.lookups <= settled <= self.lookups + self.unsure

    @invariant()
    def no_tier_exceeds_its_room(self) -> None:
        if self.cache is None:
            return
        if self.here.arena is not None:
            assert 0 <= self.here.arena.used <= self.ram
        if self.here.disk is not None:
            assert 0 <= self.here.disk.used <= max(self.limit, EMPTY_BYTES)

    @invariant()
    def nobody_goes_on_without_a_tier(self) -> None:
        if self.cache is None:
            return
        assert (self.here.arena is None) == (not self.ram)
        assert (self.here.disk is None) == (self.disk is None)

    def teardown(self) -> None:
        if self.cache is not None:
            self.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.mark.long
def test_the_tiers_return_what_would_be_computed() -> None:
    examples = int(os.environ.get("PENSTOCK_EXAMPLES", "5"))
    run_state_machine_as_test(
        TiersMachine, settings=settings(max_examples=examples, stateful_step_count=20)
    )


@pytest.mark.slow
@pytest.mark.timeout(2400)  # six minutes on an idle machine
def test_the_tiers_return_what_would_be_computed_in_a_long_run() -> None:
    run_state_machine_as_test(
        TiersMachine, settings=settings(max_examples=500, stateful_step_count=50)
    )
