"""`Pipeline.cache()` changes no byte of any batch, and computes nothing twice."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.cache import cache
from penstock.cache.cache import COMPARED, REPEATED, RandomUpstreamError
from penstock.system.shared_memory import runtime_folder
from support import cached_data
from support.cached_data import (
    EXECUTORS,
    TIERS,
    Held,
    Noted,
    TurnedClock,
    cached,
    doubled,
    each_with_another,
    of_size,
    statistics,
    tiers,
    two_epochs,
)
from support.functions import augment, digest, indices

pytestmark = pytest.mark.usefixtures("own_runtime_folder")

INLINE = EXECUTORS["inline"]
THREADS = EXECUTORS["4 thread"]
LENGTH = 40


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    log = tmp_path_factory.mktemp("plain") / "log"
    return two_epochs(cached(log, INLINE, None))


def read(log: Path) -> int:
    """Return how many samples have been read so far."""
    return Noted(LENGTH, log).reads().total()


# The same batches


@pytest.mark.parametrize(("which", "executor"), each_with_another())
def test_a_cache_changes_no_byte_cold_or_warm(
    which: str, executor: str, expected: str, log: Path, tmp_path: Path
) -> None:
    settings = tiers(which, tmp_path / "disk")
    pipe = cached(log, EXECUTORS[executor], settings)
    assert two_epochs(pipe) == expected  # the second epoch comes from RAM or from disk
    assert two_epochs(cached(log, EXECUTORS[executor], settings)) == expected


@pytest.mark.parametrize("codec", ["raw", "lz4", "zstd", "filter"])
def test_no_codec_changes_a_byte(codec: str, expected: str, log: Path) -> None:
    pipe = cached(log, THREADS, {"ram": "1MB", "codec": codec})
    assert two_epochs(pipe) == expected


ARRANGEMENTS: Mapping[str, Callable[[ps.Pipeline], ps.Pipeline]] = {
    "shuffle": lambda pipe: pipe.shuffle(seed=5),
    "repeat": lambda pipe: pipe.shuffle(seed=5).repeat(3),
    "select": lambda pipe: pipe.select([7, 7, 3, 39, 0, 11]),
    "take": lambda pipe: pipe.shuffle(seed=5).take(13),
    "all": lambda pipe: pipe.select(range(4, 30)).shuffle(seed=5).take(20).repeat(2),
}


@pytest.mark.parametrize(
    ("name", "first"),
    [*((name, False) for name in ARRANGEMENTS), ("repeat", True), ("all", True)],
)
def test_the_order_is_that_of_the_plan_wherever_the_cache_is(
    name: str, *, first: bool, log: Path
) -> None:
    arranged = ARRANGEMENTS[name]
    source = ps.Pipeline.from_dataset(Noted(LENGTH, log), **THREADS)
    expected = two_epochs(arranged(source).map(augment).batch(4))
    if first:
        pipe = arranged(source).cache(ram="1MB")
    else:
        pipe = arranged(source.cache(ram="1MB"))
    assert two_epochs(pipe.map(augment).batch(4)) == expected


def test_samples_repeated_within_an_epoch_are_computed_once(log: Path) -> None:
    data = Noted(LENGTH, log)
    with ps.Pipeline.from_dataset(data, **INLINE).cache(ram="1MB").repeat(5) as pipe:
        assert len([*pipe.batch(8)]) == 25
    assert read(log) == LENGTH + REPEATED


# Nothing is computed twice


@pytest.mark.parametrize(("which", "executor"), each_with_another())
def test_each_sample_is_computed_once_except_for_the_few_compared(
    which: str, executor: str, log: Path, tmp_path: Path
) -> None:
    with cached(log, EXECUTORS[executor], tiers(which, tmp_path / "disk")) as pipe:
        for _ in range(3):
            assert len([*pipe]) == 5
        counts = statistics(pipe)
    reads = Noted(LENGTH, log).reads()
    twice = [index for index, count in reads.items() if count > 1]
    assert sorted(reads) == list(range(LENGTH))
    looked = 2 if "process" in executor else 0  # to find what workers must not share
    assert max(reads.values()) <= 2 + min(looked, 1)
    most = REPEATED + 4 + looked  # four of the workers began at once
    assert REPEATED <= len(twice) <= most
    assert counts.misses == LENGTH


@pytest.mark.parametrize("which", ["disk", "both"])
def test_another_pipeline_finds_the_records_on_disk(
    which: str, log: Path, tmp_path: Path
) -> None:
    settings = tiers(which, tmp_path / "disk")
    two_epochs(cached(log, THREADS, settings))
    before = read(log)
    with cached(log, INLINE, settings) as pipe:
        for _ in range(3):
            assert len([*pipe]) == 5
    assert read(log) - before == COMPARED  # to check that they are still right


def test_records_in_ram_are_gone_after_close(log: Path) -> None:
    with cached(log, INLINE, {"ram": "1MB"}) as pipe:
        assert [*pipe]
        assert [*pipe]
        assert read(log) == LENGTH + REPEATED
        pipe.close()
        assert [*pipe]
        assert read(log) == 2 * (LENGTH + REPEATED)
    folder = runtime_folder()
    assert folder is not None
    assert not [*folder.iterdir()]


def test_two_pipelines_share_the_records_in_ram(log: Path) -> None:
    with cached(log, INLINE, {"ram": "1MB"}) as one:
        assert [*one]
        with cached(log, INLINE, {"ram": "1MB"}) as other:
            assert [*other]
            assert statistics(other).hits == LENGTH
    assert read(log) == LENGTH + REPEATED + COMPARED


def test_another_version_finds_no_records_of_the_one_before(
    log: Path, tmp_path: Path
) -> None:
    for version in (None, 1, "1"):
        before = read(log)
        with cached(log, INLINE, {"disk": tmp_path, "version": version}) as pipe:
            assert [*pipe]
        assert read(log) - before == LENGTH + REPEATED


def test_pipelines_that_differ_after_the_cache_share_it(
    log: Path, tmp_path: Path
) -> None:
    source = ps.Pipeline.from_dataset(Noted(LENGTH, log), **INLINE).cache(disk=tmp_path)
    with source.map(augment).batch(8) as pipe:
        assert [*pipe]
    before = read(log)
    with source.shuffle(seed=1).batch(5) as pipe:
        assert [*pipe]
    assert read(log) - before == COMPARED


# Two caches


@pytest.mark.parametrize("kind", [INLINE, THREADS], ids=["inline", "threads"])
def test_the_last_cache_is_asked_first_and_then_the_one_before(
    kind: Mapping[str, Any], log: Path, tmp_path: Path
) -> None:
    pipe = (
        ps.Pipeline.from_dataset(Noted(LENGTH, log), **kind)
        .cache(disk=tmp_path / "disk")
        .map(doubled, **kind)
        .cache(ram="1MB")
        .batch(8)
    )
    with pipe:
        digests = [digest(pipe) for _ in range(2)]
        pipe.close()  # this empties the second cache
        digests += [digest(pipe) for _ in range(2)]
        reading = pipe.stats()
    plain = ps.Pipeline.from_dataset(Noted(LENGTH, log), **INLINE).map(doubled)
    with plain.batch(8) as pipe:
        assert digests == [digest(pipe) for _ in range(4)]
    assert reading is not None
    encoded, decoded = reading.caches
    assert (encoded.name, decoded.name) == ("Cache(ID:1)", "Cache(ID:3)")
    assert encoded.tiers[0].hits + encoded.misses >= LENGTH
    assert decoded.misses == LENGTH
    assert decoded.hits >= LENGTH


# Image sizes

SIZES = ps.schedule.of(
    global_batch_size=8, image_size=ps.schedule.steps({0: 4, 0.5: 8, 2: 4})
)


@pytest.mark.parametrize(
    ("which", "kind"),
    [("RAM", THREADS), ("disk", INLINE), ("both", THREADS)],
    ids=TIERS,
)
def test_each_image_size_has_records_of_its_own(
    which: str, kind: Mapping[str, Any], log: Path, tmp_path: Path
) -> None:
    source = ps.Pipeline.from_dataset(Noted(LENGTH, log), schedule=SIZES, **kind)
    settings = tiers(which, tmp_path / "disk")
    with source.map(of_size, **kind).cache(**settings).shuffle(seed=1).batch() as pipe:
        for _ in range(4):
            for values, _ in pipe:
                assert pipe.plan is not None
                assert values.shape == (8, pipe.plan.image_size)
    assert read(log) <= 2 * LENGTH + REPEATED + 4


def test_a_cache_before_the_stage_that_uses_the_size_holds_one_copy(log: Path) -> None:
    source = ps.Pipeline.from_dataset(Noted(LENGTH, log), schedule=SIZES, **INLINE)
    with source.cache(ram="1MB").map(of_size).shuffle(seed=1).batch() as pipe:
        for _ in range(3):
            for values, _ in pipe:
                assert pipe.plan is not None
                assert values.shape == (8, pipe.plan.image_size)
        assert statistics(pipe).tiers[0].records == LENGTH
    assert read(log) == LENGTH + REPEATED


# State


@pytest.mark.parametrize(
    "which", ["RAM", "disk", pytest.param("both", marks=pytest.mark.slow)]
)
def test_a_state_from_the_middle_of_an_epoch_restores_cold_and_warm(
    which: str, log: Path, tmp_path: Path
) -> None:
    make = partial(cached, log, THREADS, tiers(which, tmp_path / "disk"))
    ps.testing.assert_exact_resume(make, epochs=2, every=3)  # warm on disk, cold in RAM


def test_a_state_restores_in_a_pipeline_with_warm_ram(log: Path) -> None:
    with cached(log, INLINE, {"ram": "1MB"}) as pipe:
        first = iter(pipe)
        next(first)
        next(first)
        state = pipe.state_dict()
        rest = [*indices(first)]
        pipe.load_state_dict(state)
        assert [*indices(pipe)] == rest
    assert read(log) == LENGTH + REPEATED


def test_states_with_and_without_a_cache_are_interchangeable(
    log: Path,
) -> None:
    with cached(log, INLINE, None) as plain, cached(log, INLINE, {"ram": 9999}) as pipe:
        rest = iter(plain)
        next(rest)
        pipe.load_state_dict(plain.state_dict())
        assert digest(pipe) == digest(rest)


def test_a_miss_is_looked_for_once_more_when_it_is_claimed_and_a_hit_once(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[bytes] = []
    find = cache.Here.find

    def noted(here: cache.Here, key: bytes) -> Any:
        looks.append(key)
        return find(here, key)

    monkeypatch.setattr(cache.Here, "find", noted)
    with cached(log, INLINE, {"ram": "1MB"}) as pipe:
        assert [*pipe]
        assert len(looks) == 2 * LENGTH
        assert [*pipe]
        assert len(looks) == 3 * LENGTH


# What is reported


def test_statistics_count_hits_and_what_they_saved(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, wait_s = TurnedClock(), 0.005
    for module in (cached_data, cache):
        monkeypatch.setattr(module, "time", clock)
    kind = {"ram": "1MB", "codec": "lz4"}
    with cached(log, INLINE, kind, wait_s=wait_s, width=1000) as pipe:
        for _ in range(3):
            assert [*pipe]
        sums = statistics(pipe)
    (ram,) = sums.tiers
    assert (sums.name, ram.name) == ("Cache(ID:2)", "RAM")
    assert (sums.hits, sums.misses) == (2 * LENGTH, LENGTH)
    assert sums.hit_share == pytest.approx(2 / 3)
    assert (ram.records, ram.evictions, sums.refused, sums.damaged) == (LENGTH, 0, 0, 0)
    assert sums.stored_bytes == ram.nbytes < LENGTH * 4000 / 2
    assert ram.seconds_saved == pytest.approx(2 * LENGTH * wait_s)


def test_a_cached_pipeline_prints_as_the_code_that_makes_it() -> None:
    pipe = ps.Pipeline.from_dataset(range(8)).cache(
        ram="2GB", disk="/nvme/cache", disk_limit="1TB", codec="lz4", version=3
    )
    code = (
        ".cache(ram=2000000000, disk='/nvme/cache', disk_limit=1000000000000,"
        " codec='lz4', version=3)"
    )
    assert repr(pipe).endswith(code)
    assert repr(ps.Pipeline.from_dataset(range(8)).cache(ram=9)).endswith(
        ".cache(ram=9)"
    )


def test_data_with_an_open_file_is_cached_for_this_run_with_one_line_why(
    log: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = Held(Noted(LENGTH, log))
    try:
        for run in (1, 2):
            caplog.clear()
            pipe = ps.Pipeline.from_dataset(data, **INLINE).cache(disk=tmp_path)
            with pipe.batch(8) as batches:
                assert [*indices(batches)] == [*indices(batches)]
            assert read(log) == run * (LENGTH + REPEATED)
            (line,) = [record.getMessage() for record in caplog.records]
            assert line.startswith("Cache(ID:1) is private to this run: ")
            assert "whether dataset.handle" in line
            assert "__penstock_fingerprint__" in line
    finally:
        data.handle.close()


# When there is no room for everything


def test_a_full_tier_serves_the_records_that_it_holds(log: Path) -> None:
    length = 500
    room = int(0.42 * length * 4100)  # of some 4.1 kB a record
    with cached(
        log, INLINE, {"ram": room, "codec": "raw"}, length=length, width=1000
    ) as pipe:
        assert [*pipe]
        assert statistics(pipe).hits == 0
        before = 0
        for _ in range(3):
            assert [*pipe]
            counts = statistics(pipe)
            assert 0.39 <= (counts.hits - before) / length <= 0.45
            before = counts.hits
        assert counts.refused > 0
        assert counts.tiers[0].nbytes <= room
        assert counts.tiers[0].evictions == 0


# What must not be stored


def at_epoch(sample: Any, ctx: Any) -> Any:
    return sample[1] + ctx.epoch


def at_step(sample: Any, ctx: Any) -> Any:
    return stepped(sample, ctx)


def stepped(sample: Any, about: Any) -> Any:
    return sample[1] + about.step


def at_strength(sample: Any, ctx: Any) -> Any:
    return sample[1] + (getattr(ctx, "strength", None) or 0)


@pytest.mark.parametrize("function", [at_epoch, at_step, at_strength])
def test_a_dataset_that_changes_with_the_epoch_cannot_be_cached(
    log: Path, function: Callable[..., Any]
) -> None:
    pipe = ps.Pipeline.from_dataset(Noted(LENGTH, log)).map(function)
    name = function.__name__.removeprefix("at_")
    with pytest.raises(ps.SpecError, match=rf"reads ctx\.{name}"):
        next(iter(pipe.cache(ram="1MB").batch(4)))


def test_a_function_that_reads_only_the_image_size_can_be_cached(log: Path) -> None:
    def sized(sample: Any, ctx: Any) -> Any:
        return sample, ctx.image_size or 0

    pipe = ps.Pipeline.from_dataset(Noted(LENGTH, log), executor="inline").map(sized)
    with pipe.cache(ram="1MB").batch(4) as batches:
        assert len([*batches]) == LENGTH // 4


def test_samples_that_are_only_sometimes_random_are_detected(log: Path) -> None:
    def flipped(sample: Any) -> Any:
        return -sample[0] if random.random() < 0.3 else sample[0]

    pipe = ps.Pipeline.from_dataset(Noted(LENGTH, log), executor="inline")
    with (
        pipe.map(flipped).cache(ram="1MB").batch(4) as batches,
        pytest.raises(RandomUpstreamError),
    ):
        assert [*batches]
