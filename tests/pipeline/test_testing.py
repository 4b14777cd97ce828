"""Drawn photos are the same for the same arguments, and either whole or missing."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

import penstock as ps
from penstock.errors import SpecError
from penstock.pipeline.testing import assert_exact_resume, content, draw_photos
from support.torch_datasets import Drawing

SMALL = (64, 48)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_photos_are_distributed_over_the_classes(tmp_path: Path) -> None:
    folder = draw_photos(tmp_path / "photos", 5, classes=2, size=SMALL)
    assert folder == tmp_path / "photos"
    assert set(contents(folder)) == {
        "photos.json",
        "class_0/img_0001.jpg",
        "class_0/img_0002.jpg",
        "class_0/img_0003.jpg",
        "class_1/img_0001.jpg",
        "class_1/img_0002.jpg",
    }
    with PIL.Image.open(folder / "class_1" / "img_0002.jpg") as picture:
        assert (picture.size, picture.mode) == (SMALL, "RGB")


def test_the_same_arguments_draw_the_same_files(tmp_path: Path) -> None:
    one = contents(draw_photos(tmp_path / "one", 6, size=SMALL, seed=3))
    two = contents(draw_photos(tmp_path / "two", 6, size=SMALL, seed=3))
    other = contents(draw_photos(tmp_path / "other", 6, size=SMALL, seed=4))
    assert one == two
    assert len(set(one.values())) == 7
    assert not set(one.values()) & set(other.values())


def test_existing_photos_are_kept_and_missing_ones_are_drawn(tmp_path: Path) -> None:
    folder = draw_photos(tmp_path, 6, size=SMALL)
    files = contents(folder)
    kept_photo, lost_photo = (
        folder / "class_0" / "img_0001.jpg",
        folder / "class_1" / "img_0002.jpg",
    )
    inode = kept_photo.stat().st_ino
    lost_photo.unlink()
    (folder / "class_1" / ".img_0002.jpg.1.1.part").write_bytes(b"half")
    draw_photos(folder, 6, size=SMALL)
    assert files.items() <= contents(folder).items()
    assert kept_photo.stat().st_ino == inode


@pytest.mark.long
def test_several_processes_may_draw_into_one_folder_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        folders = [pool.submit(draw_photos, tmp_path, 8, size=SMALL) for _ in range(4)]
    assert {folder.result() for folder in folders} == {tmp_path}
    alone = contents(draw_photos(tmp_path / "alone", 8, size=SMALL))
    assert {k: v for k, v in contents(tmp_path).items() if "alone" not in k} == alone


def test_an_interrupted_write_leaves_no_file(tmp_path: Path) -> None:
    def stop(count: int, _: int) -> None:
        if count == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        draw_photos(tmp_path, 6, size=SMALL, progress=stop)
    assert len(list(tmp_path.rglob("*.jpg"))) == 3
    assert not list(tmp_path.rglob("*.part"))
    assert len(list(draw_photos(tmp_path, 6, size=SMALL).rglob("*.jpg"))) == 6


def test_progress_counts_every_photo(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    for _ in range(2):
        draw_photos(tmp_path, 4, size=SMALL, progress=lambda *c: calls.append(c))
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)] * 2


@pytest.mark.long
def test_photos_have_the_size_and_the_spectrum_of_photos(tmp_path: Path) -> None:
    files = [p.read_bytes() for p in draw_photos(tmp_path, 8).rglob("*.jpg")]
    assert 60_000 < np.mean([len(data) for data in files]) < 120_000
    # The mean amplitude of photos falls as f^-1.2 or so; that of white noise does not.
    assert -1.4 < np.mean([slope(data) for data in files]) < -0.9


def slope(data: bytes) -> float:
    """Return the exponent of the amplitude spectrum, middle frequencies."""
    light = np.asarray(PIL.Image.open(io.BytesIO(data)).convert("L"), float)[:256, :256]
    window = np.hanning(256)[:, None] * np.hanning(256)
    amplitude = np.abs(np.fft.fft2((light - light.mean()) * window))
    frequency = np.hypot(np.fft.fftfreq(256), np.fft.fftfreq(256)[:, None])
    middle = (frequency > 0.02) & (frequency < 0.35)
    fit = np.polyfit(np.log(frequency[middle]), np.log(amplitude[middle]), 1)
    return float(fit[0])


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(SpecError, match=r"`folder` must be empty.*give a new folder"):
        draw_photos(tmp_path, 2, classes=1, size=SMALL)
    assert set(contents(tmp_path)) == {"mine.txt"}


def test_a_folder_of_other_photos_is_refused(tmp_path: Path) -> None:
    draw_photos(tmp_path, 2, classes=1, size=SMALL)
    with pytest.raises(
        SpecError, match=r'the same arguments.*"seed": 0.*another folder'
    ):
        draw_photos(tmp_path, 2, classes=1, size=SMALL, seed=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0}, "`n` must be >= 1, got 0"),
        ({"n": 2, "classes": 3}, "`classes` must be 1 to 2, got 3"),
        ({"n": 2, "classes": 0}, "`classes` must be 1 to 2, got 0"),
        ({"n": 4, "size": (500, 8)}, "`size` must be >= 16, got 8"),
        ({"n": 4, "seed": -1}, "`seed` must be >= 0, got -1"),
        ({"n": 4, "quality": 101}, "`quality` must be 1 to 100, got 101"),
    ],
)
def test_an_argument_out_of_range_is_an_error_and_draws_nothing(
    tmp_path: Path, arguments: dict[str, int], message: str
) -> None:
    folder = tmp_path / "photos"
    with pytest.raises(SpecError, match=message):
        draw_photos(folder, **arguments)  # type: ignore[arg-type]
    assert not folder.exists()


class Forgetful:
    """Two batches an epoch; a state taken between two epochs leads to another batch."""

    def __init__(self) -> None:
        self.next = self.spoilt = 0
        self.plan: Any = None

    def __iter__(self) -> Iterator[int]:
        for _ in range(2):
            epoch = self.next // 2
            self.plan = SimpleNamespace(epoch=epoch, step=self.next)
            self.next += 1
            yield self.next + self.spoilt

    def state_dict(self) -> Mapping[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.next = state["next"]
        self.spoilt = int(self.next == 2)

    def close(self) -> None:
        pass


def test_states_at_the_ends_of_epochs_are_checked_however_few_others_are() -> None:
    with pytest.raises(AssertionError, match="after state 2: batch of step 2 differs"):
        assert_exact_resume(Forgetful, epochs=2, every=100)


@pytest.mark.parametrize("settings", [{"num_workers": 0}, {"sample_seeding": True}])
def test_loaders_are_checked_whoever_loads(settings: dict[str, Any]) -> None:
    def make() -> ps.DataLoader[Any]:
        torch.manual_seed(0)
        return ps.DataLoader(range(10), 4, shuffle=True, **settings)  # type: ignore[arg-type]

    assert_exact_resume(make, epochs=2)

    def forgets() -> ps.DataLoader[Any]:
        return ps.DataLoader(Drawing(10), 4, **settings)

    if "num_workers" in settings:  # and nobody seeds what a sample draws
        with pytest.raises(AssertionError, match="after state 0: batch of step 0 "):
            assert_exact_resume(forgets)


ZERO, NAN = 0.0, float("nan")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([1, 2]), torch.tensor([1, 2], dtype=torch.int32)),
        (torch.tensor([ZERO]), torch.tensor([-ZERO])),
        (np.array([1.0]), np.array([1.0], np.float32)),
        (np.array([ZERO]), np.array([-ZERO])),
        (np.array([ZERO, None]), np.array([-ZERO, None])),
        (np.float32(1), np.float64(1)),
        ({"a": [ZERO]}, {"a": [-ZERO]}),
        ([1], (1,)),
        (1, True),
    ],
)
def test_batches_of_other_types_or_bytes_differ(one: Any, other: Any) -> None:
    assert content(one) != content(other)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([NAN, 1.0], dtype=torch.bfloat16),
        lambda: np.array([NAN, 1.0]),
        lambda: np.array([float("nan"), "text"], object),
        lambda: np.array(["2026-11-29"], "datetime64[D]"),
        lambda: {"a": (float("nan"), b"bytes", None)},
    ],
)
def test_batches_of_the_same_types_and_bytes_are_the_same(make: Any) -> None:
    assert content(make()) == content(make())
