"""LMDB, tars, Parquet and Arrow train, resume and have fingerprints."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

import penstock as ps
from penstock.pipeline.sources import folder as paths
from penstock.pipeline.sources.source import identity_of
from support.forked import forked

N = 60
SHARDS = 4


def payload(number: int) -> bytes:
    return np.random.default_rng(number).bytes(20 + number)


def write_lmdb(folder: Path) -> str:
    path = str(folder / "numbers.lmdb")
    with (
        lmdb.open(path, map_size=1 << 24) as environment,
        environment.begin(write=True) as transaction,
    ):
        for number in range(N):
            transaction.put(f"{number:04d}".encode(), payload(number))
    return path


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def write_tars(folder: Path, field: str = "bin") -> str:
    for shard in range(SHARDS):
        with tarfile.open(folder / f"train-{shard}.tar", "w") as tar:
            for number in range(shard * N // SHARDS, (shard + 1) * N // SHARDS):
                add(tar, f"deep/{number:04d}.{field}", payload(number))
                add(tar, f"deep/{number:04d}.cls", b"%d" % number)
    return str(folder / "train-*.tar")


def write_table(folder: Path, kind: str) -> str:
    """Write files of two row groups each; Arrow's are files and streams in turn."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    for shard in range(SHARDS):
        numbers = range(shard * N // SHARDS, (shard + 1) * N // SHARDS)
        columns = {"data": [*map(payload, numbers)], "number": [*numbers]}
        table, path = pa.table(columns), str(folder / f"train-{shard}.{kind}")
        if kind == "parquet":
            pq.write_table(table, path, row_group_size=8)
            continue
        make = pa.ipc.new_file if shard % 2 else pa.ipc.new_stream
        with make(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=8)
    return str(folder / f"train-*.{kind}")


Make = Callable[[], ps.Pipeline]


def make_lmdb(folder: Path) -> Make:
    path = write_lmdb(folder)
    return lambda: ps.Pipeline.from_lmdb(path).map(lambda data: (data, len(data) - 20))


def make_tars(folder: Path) -> Make:
    pattern = write_tars(folder)
    return lambda: ps.Pipeline.from_webdataset(pattern, ("bin", "cls"))


def of_row(row: dict[str, Any]) -> tuple[bytes, int]:
    return row["data"], row["number"]


def make_parquet(folder: Path) -> Make:
    pattern = write_table(folder, "parquet")
    return lambda: ps.Pipeline.from_parquet(pattern).map(of_row)


def make_arrow(folder: Path) -> Make:
    pattern = write_table(folder, "arrow")
    return lambda: ps.Pipeline.from_arrow(pattern).map(of_row)


MAKERS = [make_lmdb, make_tars, make_parquet, make_arrow]
GROUPED = MAKERS[1:]
every = pytest.mark.parametrize("maker", MAKERS)


def source_of(pipe: ps.Pipeline) -> Any:
    stage: Any = pipe._stages[0]  # noqa: SLF001
    return stage.dataset


def first_executor(pipe: ps.Pipeline) -> str:
    """Return the kind of workers that the reader starts with."""
    return pipe._compiled().segments[0].executor  # noqa: SLF001


def samples(pipe: ps.Pipeline) -> list[tuple[bytes, int]]:
    with pipe.batch(7, collate_fn=list) as batches:
        return [sample for batch in batches for sample in batch]


EXPECTED = [(payload(number), number) for number in range(N)]


@pytest.mark.long
@every
def test_a_source_moves_to_processes_and_back_while_it_is_read(
    maker: Any, tmp_path: Path
) -> None:
    source = source_of(maker(tmp_path)())
    data = ps.Pipeline.from_dataset(source, num_parallel_workers=2).repeat(2)
    moves, kinds, outputs = {4: "process", 20: "thread"}, [], []
    with data.batch(3, collate_fn=list) as pipe:
        for at, batch in enumerate(pipe):
            outputs += batch
            run: Any = pipe._slot.run  # noqa: SLF001 there is no other way to a live one
            executor = next(k for k in run.knobs() if k.name == "executor")
            if at in moves:
                executor.write(moves[at])
            kinds.append(run.host.engine.segments[0].executor)
    assert outputs == [source[at] for at in range(N)] * 2
    assert [kinds[4], kinds[19], kinds[-1]] == ["thread", "process", "thread"]


@every
@pytest.mark.parametrize("workers", [None, 2])
def test_a_memory_map_starts_in_the_trainer_if_reading_is_all(
    maker: Any, workers: int | None, tmp_path: Path
) -> None:
    make = maker(tmp_path)
    source = source_of(make())
    data = ps.Pipeline.from_dataset(source, num_parallel_workers=workers)
    alone, before_others = data.batch(7, collate_fn=list), data.map(len).batch(7)
    mapped = maker in (make_lmdb, make_arrow) and workers is None
    assert first_executor(alone) == ("auto" if mapped else "thread")
    assert first_executor(before_others) == "thread"


@every
@pytest.mark.parametrize("executor", ["auto", "inline", "thread", "process"])
def test_every_sample_comes_once_and_in_order(
    maker: Any, executor: Any, tmp_path: Path
) -> None:
    pipe = maker(tmp_path)()
    source = source_of(pipe)
    assert len(source) == N
    workers = None if executor == "inline" else 3
    read_by = ps.Pipeline.from_dataset(
        source, executor=executor, num_parallel_workers=workers
    )
    with read_by.batch(7, collate_fn=list) as batches:
        outputs = [sample for batch in batches for sample in batch]
    assert outputs == [source[at] for at in range(N)]
    assert samples(pipe) == EXPECTED


@every
def test_an_epoch_resumes_where_it_was_left(maker: Any, tmp_path: Path) -> None:
    make = maker(tmp_path)
    ps.testing.assert_exact_resume(lambda: make().shuffle(seed=3).batch(7), every=3)


@pytest.mark.parametrize("maker", GROUPED)
def test_shards_are_shuffled_through_a_window_and_can_be_resumed(
    maker: Any, tmp_path: Path
) -> None:
    make = maker(tmp_path)
    source = source_of(make())
    assert sum(source.group_sizes) == N
    assert len(source.group_sizes) >= SHARDS
    shuffled = samples(make().shuffle(seed=3, window=2))
    assert shuffled != EXPECTED
    assert sorted(shuffled, key=lambda sample: sample[1]) == EXPECTED

    ps.testing.assert_exact_resume(
        lambda: make().shuffle(seed=3, window=2).batch(7), every=3
    )


@every
def test_fingerprints_survive_a_copy_and_each_sample_has_one(
    maker: Any, tmp_path: Path
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    make = maker(here)
    first, again, copy = source_of(make()), source_of(make()), source_of(maker(there)())
    prints = first.sample_fingerprints()
    assert (prints.dtype, prints.shape) == (np.uint64, (N, 2))
    assert len(np.unique(prints, axis=0)) == N
    assert np.array_equal(prints, again.sample_fingerprints())
    assert identity_of(first) == identity_of(again) == identity_of(copy) is not None
    travelled = pickle.loads(pickle.dumps(first))  # noqa: S301 our own
    assert np.array_equal(prints, travelled.sample_fingerprints())
    assert travelled[N - 1] == first[N - 1]
    for path in here.rglob("*"):
        os.utime(path, ns=(1, 10**18 + 12345))
    changed = first.sample_fingerprints()
    assert not (prints == changed).all(axis=1).any()


@pytest.mark.long
@every
def test_a_cache_serves_the_samples_it_has_kept(maker: Any, tmp_path: Path) -> None:
    def make() -> ps.Pipeline:
        return make_pipe().cache(disk=tmp_path / "kept").batch(7, collate_fn=list)

    (tmp_path / "data").mkdir()
    make_pipe = maker(tmp_path / "data")
    for _ in range(2):
        with make() as batches:
            assert [sample for batch in batches for sample in batch] == EXPECTED


# What is refused


def test_pickles_are_refused_by_name_unless_left_out(tmp_path: Path) -> None:
    for field in ("pkl", "pyd", "pth", "state.pth"):
        pattern = write_tars(tmp_path, field)
        with pytest.raises(ps.SpecError, match=f"does not read the field '{field}'"):
            ps.Pipeline.from_webdataset(pattern)
        with pytest.raises(ps.SpecError, match=f"does not read the field '{field}'"):
            ps.Pipeline.from_webdataset(pattern, ("cls", field))
        pipe = ps.Pipeline.from_webdataset(pattern, ("cls",))
        assert [label for (label,) in samples(pipe)] == [*range(N)]


def test_an_array_of_objects_is_not_unpickled(tmp_path: Path) -> None:
    content = io.BytesIO()
    np.save(content, np.array([{}], object), allow_pickle=True)
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        add(tar, "0.npy", content.getvalue())
    source = source_of(ps.Pipeline.from_webdataset(tmp_path / "a.tar"))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        source[0]


def test_a_truncated_shard_is_an_error(tmp_path: Path) -> None:
    source = source_of(ps.Pipeline.from_webdataset(write_tars(tmp_path)))
    os.truncate(tmp_path / "train-0.tar", 600)
    with pytest.raises(OSError, match="train-0.tar ends within a sample"):
        source[3]
    assert source[N - 1]["cls"] == N - 1


def test_a_field_that_occurs_twice_in_a_sample_is_refused(tmp_path: Path) -> None:
    """The webdataset package refuses it too: names must differ in more than case."""
    path = tmp_path / "a.tar"
    for names in (["0.jpg", "1.cls", "1.jpg", "1.cls"], ["1.cls", "1.CLS"]):
        with tarfile.open(path, "w") as tar:
            for name in names:
                add(tar, name, b"0")
        with pytest.raises(ps.SpecError, match="field 'cls' of sample '1' twice in"):
            ps.Pipeline.from_webdataset(path)


def test_a_file_that_cannot_be_read_is_refused_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "MAX_FILES", 999)
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        add(tar, "0.bin", b"0")
    (tmp_path / "empty.lmdb").mkdir()
    refused = [
        (ps.Pipeline.from_webdataset, "pipe:cat a.tar", "runs no commands"),
        (ps.Pipeline.from_webdataset, "a-{0..999}.tar", "see that the numbers"),
        (ps.Pipeline.from_webdataset, "a-{1..999}.tar", "found no file"),
        (ps.Pipeline.from_webdataset, tmp_path / "a-{0..2}.tar", "found no file"),
        (ps.Pipeline.from_webdataset, tmp_path / "*.tar", "found no file"),
        (ps.Pipeline.from_webdataset, tmp_path / "a.tar.gz", "are not compressed"),
        (ps.Pipeline.from_lmdb, tmp_path / "no.lmdb", "cannot open"),
        (ps.Pipeline.from_lmdb, tmp_path / "empty.lmdb", "cannot open"),
    ]
    for make, path, message in refused:
        with pytest.raises(ps.SpecError, match=message):
            make(path)


def test_a_child_forked_while_threads_read_lmdb_reads_it_too(tmp_path: Path) -> None:
    """A call of LMDB that a fork interrupts never ends in the child."""
    source = source_of(ps.Pipeline.from_lmdb(write_lmdb(tmp_path)))
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            source.__getitems__(range(N))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            with forked(lambda end: end.tell(str(source[1] == payload(1)))) as child:
                assert child.hear() == "True"
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_an_lmdb_database_may_be_opened_once_no_source_has_it_open(
    tmp_path: Path,
) -> None:
    path = write_lmdb(tmp_path)
    source = source_of(ps.Pipeline.from_lmdb(path))
    assert source[0] == payload(0)
    del source
    lmdb.open(path).close()


def test_a_table_in_a_store_is_refused_with_the_cure() -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(ps.SpecError, match="mount the store"):
        ps.Pipeline.from_arrow("s3://bucket/a.arrow")


def test_columns_can_be_chosen_and_must_exist(tmp_path: Path) -> None:
    for kind, make in (
        ("parquet", ps.Pipeline.from_parquet),
        ("arrow", ps.Pipeline.from_arrow),
    ):
        pattern = write_table(tmp_path, kind)
        assert source_of(make(pattern, ["number"]))[N - 1] == {"number": N - 1}
        with pytest.raises(ps.SpecError, match="no column 'label', only data, number"):
            make(pattern, ["label"])


def write_groups(folder: Path, groups: int, rows: int, nbytes: int) -> str:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    count = groups * rows
    data = [np.random.default_rng(number).bytes(nbytes) for number in range(count)]
    table = pa.table({"data": data, "number": [*range(count)]})
    pq.write_table(table, str(folder / "groups.parquet"), row_group_size=rows)
    return str(folder / "groups.parquet")


def test_row_groups_in_memory_are_bounded_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is an eighth of the memory budget, but one group is always kept."""
    path = write_groups(tmp_path, groups=20, rows=8, nbytes=1000)
    source = source_of(ps.Pipeline.from_parquet(path))
    for budget, counts in ((8 * 5 * 8500, range(3, 6)), (8, [1]), (1 << 30, [20])):
        monkeypatch.setattr("penstock.config._measured_bytes", lambda n=budget: n)
        source = source_of(ps.Pipeline.from_parquet(path))
        for at in range(0, len(source), 4):
            assert source[at]["number"] == at
            groups = source._rows._groups._values.values()  # noqa: SLF001
            held_bytes = sum(nbytes or 0 for _, nbytes in groups)
            assert held_bytes <= max(budget // 8, 8500)
        assert held_bytes // 8000 in counts


@pytest.mark.parametrize("window", [None, 8])
def test_reading_the_same_row_groups_over_and_over_causes_a_warning(
    window: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_groups(tmp_path, groups=60, rows=16, nbytes=10)
    pipe = ps.Pipeline.from_parquet(path, groups_in_memory=16)
    with pipe.shuffle(seed=0, window=window).batch(8, collate_fn=list) as batches:
        assert sum(len(batch) for _ in range(2) for batch in batches) == 2 * 60 * 16
    texts = [text for text in caplog.messages if "rows for each one it returns" in text]
    assert len(texts) == (window is None)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_reads_its_share_of_the_row_groups(ranks: int, tmp_path: Path) -> None:
    """It may read a tenth more: the groups at the border of two parts."""
    groups = 80
    path = write_groups(tmp_path, groups, rows=16, nbytes=10)
    whole: list[int] = []
    for rank in range(ranks):
        pipe = ps.Pipeline.from_parquet(
            path, executor="inline", shard=ps.Shard(rank, ranks)
        )
        source = source_of(pipe)
        with pipe.shuffle(seed=0, window=2, parts=4).batch(
            global_size=32, collate_fn=list
        ) as batches:
            whole += [row["number"] for batch in batches for row in batch]
        assert source._reads <= 1.1 * groups / ranks + 1  # noqa: SLF001
    assert sorted(whole) == [*range(16 * groups)]


def test_a_tar_is_read_as_webdataset_reads_it(tmp_path: Path) -> None:
    readers = pytest.importorskip("webdataset.tariterators")
    pattern = write_tars(tmp_path)
    theirs = []
    for shard in range(SHARDS):
        with open(tmp_path / f"train-{shard}.tar", "rb") as file:
            members = list(readers.tar_file_iterator(file))
        rows = readers.group_by_keys({**entry, "__url__": shard} for entry in members)
        theirs += [(row["__key__"], row["bin"], int(row["cls"])) for row in rows]
    source = source_of(ps.Pipeline.from_webdataset(pattern))
    ours = [(sample["__key__"], sample["bin"], sample["cls"]) for sample in source]
    assert ours == theirs


def test_a_file_may_be_named_like_a_pattern(tmp_path: Path) -> None:
    write_tars(tmp_path)
    odd = (tmp_path / "train-0.tar").rename(tmp_path / "train[ab].tar")
    source = source_of(ps.Pipeline.from_webdataset(str(odd)))
    assert len(source) == N // SHARDS
