"""A setting holds only values that a trainer can use."""

import json

import pytest

from penstock.engine.plan import ConstantSchedule, Place, Setting
from penstock.errors import SpecError


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"global_size": 0}, "`global_size` must be >= 1, got 0"),
        ({"global_size": 1, "image_size": 0}, "`image_size` must be >= 1 pixel"),
        ({"global_size": 1, "lr_mult": -0.5}, "`lr_mult` must be >= 0, got -0.5"),
        (
            {"global_size": 1, "lr_mult": float("nan")},
            "`lr_mult` must be >= 0, got nan",
        ),
        ({"global_size": 1, "momentum": 1.5}, "`momentum` must be 0 to 1 or None"),
    ],
)
def test_a_bad_value_is_refused_by_name(setting: dict[str, float], told: str) -> None:
    with pytest.raises(SpecError, match=told):
        Setting(**setting)  # type: ignore[arg-type]


def test_a_constant_schedule_never_changes_and_describes_itself_in_json() -> None:
    constant = ConstantSchedule(Setting(64, image_size=224, momentum=0.9))
    far = Place(10**6, 5, 10**12, 10**9)
    assert constant.at(far) == Setting(64, 224, 1.0, 0.9)
    assert constant.next_change(far) is None
    assert json.loads(json.dumps(constant.describe()))["global_size"] == 64


def test_a_place_counts_samples_over_epochs() -> None:
    assert Place(epoch=3, position=7, step=0, epoch_length=100).samples == 307
