"""A state is small JSON; one that does not fit is refused with words that help."""

import json

import pytest

from penstock.engine.plan import ConstantSchedule, Cursor, Order, Plan, Setting, Shard
from penstock.errors import StateError

PLAN = Plan(
    Order.sequential(100).shuffle(3), ConstantSchedule(Setting(8)), Shard.single()
)
STATE = PLAN.state(PLAN.cursor_after(PLAN.batch(20)))


def test_a_state_has_the_same_text_in_every_release() -> None:
    schedule = (
        '{"global_size":8,"image_size":null,"kind":"constant",'
        '"lr_mult":1.0,"momentum":null}'
    )
    assert PLAN.state(Cursor(1, 8, 21, 64)) == {
        "version": 1,
        "plan": "fe1d861e3439dc6b19aeea54221a1450",
        "facts": {
            "length": 100,
            "order": "sequential(100).shuffle(seed=3)",
            "schedule": schedule,
            "drop_last": 0,
            "tail": "pad_mask",
        },
        "epoch": 1,
        "batch": 8,
        "step": 21,
        "position": 64,
    }


def test_a_state_survives_json() -> None:
    assert PLAN.restore(json.loads(json.dumps(STATE))) == Cursor(1, 8, 21, 64)


def test_every_rank_of_every_world_writes_the_same_state() -> None:
    for shard in (Shard(0, 2), Shard(1, 2), Shard(7, 8)):
        plan = Plan(PLAN.order, PLAN.schedule, shard)
        assert plan.state(plan.cursor_after(plan.batch(20))) == STATE


def test_an_error_about_another_plans_state_names_both_values() -> None:
    order = Order.sequential(90).shuffle(3)
    other = Plan(order, ConstantSchedule(Setting(8)), Shard.single(), drop_last=True)
    message = r"plan \(length: saved 100, now 90; order: .*; drop_last: saved 0, now 1"
    with pytest.raises(StateError, match=message):
        other.restore(STATE)


@pytest.mark.parametrize("version", [0, 2, "1", None, True])
def test_an_unknown_version_is_refused_and_shown(version: object) -> None:
    with pytest.raises(StateError, match=f"`version` must be 1, got {version!r}"):
        PLAN.restore({**STATE, "version": version})


@pytest.mark.parametrize("name", ["epoch", "batch", "step", "position"])
@pytest.mark.parametrize("value", [-1, 1.0, "1", None, True])
def test_a_field_that_is_not_a_count_is_refused_by_name(
    name: str, value: object
) -> None:
    with pytest.raises(
        StateError, match=f"`{name}` must be an int >= 0, got {value!r}"
    ):
        PLAN.restore({**STATE, name: value})


@pytest.mark.parametrize("name", ["epoch", "batch", "step", "position"])
def test_fields_that_do_not_fit_each_other_are_refused(name: str) -> None:
    with pytest.raises(StateError, match="damaged: no batch of this plan starts at"):
        PLAN.restore({**STATE, name: 50})


@pytest.mark.parametrize("facts", [None, [], STATE["facts"]])
def test_another_hash_of_the_same_facts_counts_as_damage(facts: object) -> None:
    with pytest.raises(StateError, match="damaged: its `plan` and `facts`"):
        PLAN.restore({**STATE, "plan": "0" * 32, "facts": facts})


@pytest.mark.parametrize("state", [None, [1], "state"])
def test_a_value_that_is_not_a_dict_is_not_a_state(state: object) -> None:
    with pytest.raises(StateError, match="a state must be a dict, got"):
        PLAN.restore(state)  # type: ignore[arg-type]
