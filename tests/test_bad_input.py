"""Bad input: each error names the value, the rule and the cure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from support.datasets import KINDS, Numbers

Kind = Mapping[str, Any]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(params=["inline", "2 threads"])
def here(request: pytest.FixtureRequest) -> Kind:
    """Return workers of the trainer's process, for what says the same of others."""
    return KINDS[request.param]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    return ps.testing.draw_photos(folder, 6, classes=2, size=(64, 48))


def numbers() -> ps.Pipeline:
    return ps.Pipeline.from_dataset(Numbers(10))


# Wrong descriptions are refused in the line that gives them


@pytest.mark.parametrize(
    ("describe", "message"),
    [
        (
            lambda p: p.batch(0),
            "the batch size must be an int >= 1, got 0",
        ),
        (lambda p: p.batch(-3), "the batch size must be an int >= 1, got -3"),
        (lambda p: p.batch(2.5), "the batch size must be an int >= 1, got 2.5"),
        (
            lambda p: p.batch(),
            "Pipeline.batch() needs one size: batch(n), samples a rank;",
        ),
        (lambda p: p.batch(2, global_size=4), "Pipeline.batch() needs one size"),
        (
            lambda p: p.map(abs, executor="fast"),
            (
                "`executor` must be one of auto, inline, thread, process, async, ray,"
                " got 'fast'"
            ),
        ),
        (
            lambda p: p.map(abs, num_parallel_workers=0),
            "`num_parallel_workers` must be >= 1, got 0; to work in the trainer's own",
        ),
        (
            lambda p: p.map(abs, num_parallel_workers=(4, 2)),
            "`num_parallel_workers=(lo, hi)` must have lo <= hi, got (4, 2)",
        ),
        (
            lambda p: p.map(abs, num_parallel_workers=2, executor="inline"),
            'executor="inline" has one worker, the trainer itself, got',
        ),
        (lambda p: p.map(3), "Pipeline.map() needs a function of one sample, got 3"),
        (
            lambda p: p.filter(None),
            "Pipeline.filter() needs a function of one sample, got None",
        ),
        (
            lambda p: p.shuffle(seed=-1),
            "`seed` must be an int from 0 to 2**64 - 1, got -1",
        ),
        (
            lambda p: p.shuffle(1000),
            "Pipeline.shuffle() takes nothing but `seed=`, got 1000: it needs no",
        ),
        (
            lambda p: p.shuffle(None),
            "Pipeline.shuffle() takes nothing but `seed=`, got None",
        ),
        (lambda p: p.take(0), "`count` must be an int >= 1, got 0; take() keeps"),
        (lambda p: p.repeat(0), "`count` must be an int >= 1, got 0; repeat(1)"),
        (lambda p: p.select([]), "`indices` must not be empty"),
        (lambda p: p.batch(2).batch(2), "Pipeline.batch(2) cannot come after .batch()"),
        (lambda p: p.to_device("cpu"), "put it after .batch(n)"),
        (lambda p: p.batch(2).to_device("gpu9"), '`device` must be one such as "cpu"'),
        (
            lambda p: p.batch(2, on_error="skip"),
            "`on_error` must be 'raise' or 'substitute', got 'skip'",
        ),
        (lambda p: p.batch(2, error_budget=3), "from 0 to 1, got 3"),
        (lambda p: p.batch(2, tail="cut"), "`tail` must be 'pad_mask' or"),
    ],
)
def test_an_impossible_description_is_refused_in_its_line(
    describe: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises(ps.SpecError) as caught:
        describe(numbers())
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (iter, "the pipeline has no batch size; end it with .batch(n)"),
        (len, "the pipeline has no batch size; end it with .batch(n)"),
    ],
)
def test_a_pipeline_without_batches_is_refused(
    use: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises(ps.SpecError) as caught:
        use(numbers())
    assert message in str(caught.value)


def test_an_index_beyond_the_dataset_is_refused() -> None:
    with pytest.raises(ps.SpecError, match=">= 0 and < 10, .*, got 10"):
        len(numbers().select([3, 10]).batch(2))


def test_an_epoch_without_a_batch_is_refused() -> None:
    with pytest.raises(ps.SpecError, match="10 samples has no batch of 11.*drop_last"):
        len(numbers().batch(11, drop_last=True))


@pytest.mark.parametrize("epoch", [-1, 1.5, "1", None])
def test_an_epoch_that_is_not_a_count_is_refused(epoch: Any) -> None:
    with pytest.raises(ps.SpecError, match="`epoch` must be an int >= 0, got"):
        numbers().batch(2).set_epoch(epoch)


@pytest.mark.parametrize("empty", [[], {}, np.empty((0, 3))])
def test_an_empty_dataset_is_refused(empty: Any) -> None:
    with pytest.raises(ps.SpecError, match="is empty; it must hold at least one"):
        ps.Pipeline.from_dataset(empty)


@pytest.mark.parametrize("nothing", [None, 3, object()])
def test_an_object_that_is_not_a_dataset_is_refused(nothing: Any) -> None:
    with pytest.raises(ps.SpecError, match="needs a dataset with __len__ and"):
        ps.Pipeline.from_dataset(nothing)


# Folders


@pytest.mark.parametrize(
    ("data", "cure"),
    [
        ("photos/", "use from_folder"),
        (Path("photos"), "use from_folder"),
        ({"image": [1, 2], "label": [0, 1]}, "StackDataset"),
        ((index for index in range(3)), "an object whose __iter__ starts again"),
        (zip([1], [2], strict=True), "an object whose __iter__ starts again"),
    ],
    ids=["text", "path", "columns", "generator", "zip"],
)
def test_an_object_that_only_looks_like_a_dataset_is_refused_with_the_cure(
    data: Any, cure: str
) -> None:
    with pytest.raises(ps.SpecError, match=cure):
        ps.Pipeline.from_dataset(data)


def test_a_loader_of_a_table_warns_that_its_index_picks_columns() -> None:
    class DataFrame(list[int]):
        """A frame like that of pandas, which the tests need not install."""

        __module__ = "pandas.core.frame"

    class Table(list[int]):
        """A table like that of Arrow."""

        __module__ = "pyarrow.lib"

    for table in (DataFrame([1]), Table([1])):
        with pytest.warns(UserWarning, match="an index picks a column"):
            ps.DataLoader(table)


def test_an_error_about_a_missing_argument_names_pipelines_method() -> None:
    pipe: Any = ps.Pipeline.from_dataset([1])
    with pytest.raises(TypeError, match=r"^Pipeline\.map\(\) missing"):
        pipe.map()


def test_a_users_iterator_that_can_restart_is_a_dataset() -> None:
    class Begins:
        def __iter__(self) -> Any:
            self.at = 0
            return self

        def __next__(self) -> int:
            self.at += 1
            if self.at > 3:
                raise StopIteration
            return self.at

    with ps.Pipeline.from_dataset(Begins()).batch(3) as pipe:
        assert [[b.tolist() for b in pipe] for _ in range(2)] == [[[1, 2, 3]]] * 2


def test_a_dict_of_samples_by_number_is_a_dataset() -> None:
    with ps.Pipeline.from_dataset({0: 5, 1: 6}).batch(2) as pipe:
        assert [batch.tolist() for batch in pipe] == [[5, 6]]


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ps.SpecError, match="missing.*does not exist; give the folder"):
        ps.Pipeline.from_folder(tmp_path / "missing")


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ps.SpecError, match="which is a file"):
        ps.Pipeline.from_folder(tmp_path / "file")


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ps.SpecError, match="found nothing in.*is empty of class"):
        ps.Pipeline.from_folder(tmp_path)


def test_class_folders_without_images_are_named(tmp_path: Path) -> None:
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "notes.txt").touch()
    with pytest.raises(ps.SpecError, match=r"no image below.*cats.*\.jpg"):
        ps.Pipeline.from_folder(tmp_path)


def test_images_without_class_folders_are_named(tmp_path: Path) -> None:
    (tmp_path / "cat.jpg").touch()
    with pytest.raises(ps.SpecError, match="images, but no class folders"):
        ps.Pipeline.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        *(("decode_random_resized_crop", kind) for kind in KINDS),
        ("decode", "2 threads"),
    ],
)
def test_a_truncated_jpeg_is_named_by_its_index(
    photos: Path, operator: str, kind: str
) -> None:
    how = KINDS[kind]
    if operator == "decode":
        function: Any = ps.image.decode
    else:
        function = ps.image.decode_random_resized_crop(32)
    data = [path.read_bytes() for path in sorted(photos.rglob("*.jpg"))]
    data[4] = data[4][: len(data[4]) // 3]
    pipe = ps.Pipeline.from_dataset(data, **how).map(function, **how).batch(2)
    with pipe:
        loop = iter(pipe)
        next(loop)
        next(loop)
        with pytest.raises(Exception, match=".+") as caught:
            next(loop)
    assert "sample index 4 (epoch 0, step 2" in "\n".join(caught.value.__notes__)


def test_a_folder_reads_and_labels_its_images(photos: Path, here: Kind) -> None:
    pipe = ps.Pipeline.from_folder(photos, **here)
    with pipe.map(ps.image.decode_random_resized_crop(32), **here).batch(3) as batched:
        images, labels = zip(*batched, strict=True)
    assert [label.tolist() for label in labels] == [[0, 0, 0], [1, 1, 1]]
    assert [tuple(image.shape) for image in images] == [(3, 32, 32, 3)] * 2


# Functions that break their contract


def first_error(pipe: ps.Pipeline) -> BaseException:
    with pipe, pytest.raises(Exception, match=".*") as caught:
        list(pipe)
    return caught.value


def test_a_function_that_returns_none_is_named(kind: Kind) -> None:
    def forgets(sample: Any) -> Any:
        if sample[1] != 5:
            return sample
        return None

    pipe = ps.Pipeline.from_dataset(Numbers(10), **kind).map(forgets, **kind)
    error = first_error(pipe.batch(2))
    assert type(error) is ps.SampleError
    assert "Map(ID:1) forgets returned None" in str(error)
    assert "is a `return` missing?" in str(error)
    assert "sample index 5 (epoch 0, step 2, row 1" in "\n".join(error.__notes__)


def test_a_function_that_raises_stop_iteration_is_named(here: Kind) -> None:
    def runs_dry(sample: Any) -> Any:
        return next(iter([])) if sample[1] == 5 else sample

    pipe = ps.Pipeline.from_dataset(Numbers(10), **here).map(runs_dry, **here)
    error = first_error(pipe.batch(2))
    assert type(error) is ps.SampleError
    assert "Map(ID:1) runs_dry raised StopIteration" in str(error)
    assert "sample index 5 (" in "\n".join(error.__notes__)


def test_a_function_with_a_wrong_signature_is_named(here: Kind) -> None:
    def takes_two(image: Any, label: Any) -> Any:
        return image

    pipe = ps.Pipeline.from_dataset(Numbers(10), **here).map(takes_two, **here)
    error = first_error(pipe.batch(2))
    assert type(error) is TypeError
    assert "Map(ID:1) takes_two, sample index 0" in "\n".join(error.__notes__)


def test_samples_that_make_no_batch_are_named() -> None:
    pipe = ps.Pipeline.from_dataset([object() for _ in range(4)], executor="inline")
    error = first_error(pipe.batch(2))
    assert type(error) is TypeError
    assert "default_collate" in str(error)
    assert "Batch(ID:1)" in "\n".join(error.__notes__)


def test_a_dataset_whose_getitems_returns_too_few_is_read_one_by_one() -> None:
    class Lazy(Numbers):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [self[index] for index in indices[:-1]]

    with ps.Pipeline.from_dataset(Lazy(10), executor="inline").batch(5) as pipe:
        assert [b[1].tolist() for b in pipe] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


@pytest.mark.parametrize("kind", [str, Path])
def test_a_loader_warns_of_an_object_that_only_looks_like_a_dataset(
    kind: type[Any], tmp_path: Path
) -> None:
    expected = "this .*(str|Path) is not a dataset: a path .* use from_folder"
    with pytest.warns(UserWarning, match=expected) as records:
        ps.DataLoader(kind(tmp_path), sampler=[0])
    assert records[0].filename == __file__
    assert list(ps.DataLoader({0: "a", 1: "b"})) == [["a"], ["b"]]  # type: ignore[arg-type]
