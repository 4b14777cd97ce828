"""Equal values have one digest in every process; other values and code have others."""

from __future__ import annotations

import ctypes
import functools
import json
import math
import os
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from itertools import product
from operator import attrgetter, itemgetter, methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache.fingerprint import Undigestible, digest
from support import cache_things, warm
from support.cache_things import (
    Color,
    Compose,
    Handles,
    Point,
    Row,
    Scale,
    Stamped,
    loaded,
)

SUPPORT = str(Path(cache_things.__file__).parents[1])


def of(value: Any) -> bytes:
    return digest(value, "value")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[..., types.ModuleType]:
    return functools.partial(loaded, monkeypatch)


SPAWNS = """
import json, multiprocessing, os, sys
from penstock.cache.fingerprint import digest
from support.cache_things import digests
class Crop:
    def __call__(self, x): return helper(x)
def helper(x):
    class Local:
        "Made as it runs."
        def __init__(self): self.a, self.b, self.c = x
    return Local
def say(crop):
    own = digest([Crop, helper, crop], "x").hex()
    print(json.dumps([hash("a"), own, digests()]), flush=True)
if __name__ == "__main__":
    say(Crop())
    old = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = "1" if old != "1" else "2"
    for method in sys.argv[1:]:
        context = multiprocessing.get_context(method)
        process = context.Process(target=say, args=(Crop(),))
        process.start()
        process.join()
"""
AS_SPAWNED = """
import multiprocessing.spawn, sys
multiprocessing.spawn._fixup_main_from_path(sys.argv[1])
main = sys.modules["__main__"]
main.say(main.Crop())
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SPAWNS)
    return str(path)


def told(*arguments: str) -> list[list[Any]]:
    """Return what each process of a script says of its digests."""
    path = os.pathsep.join((SUPPORT, os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, "-P", *arguments]
    process = warm.run(command, env=os.environ | {"PYTHONPATH": path}, brief=True)
    return [json.loads(line) for line in process.stdout.splitlines()]


def test_a_script_and_its_forks_and_spawns_find_the_same_digests(script: str) -> None:
    in_script, forked = told(script, "fork")
    (as_spawned,) = told("-c", AS_SPAWNED, script)
    assert in_script == forked == as_spawned
    here = [hash("a"), in_script[1], cache_things.digests()]
    assert here[1:] == in_script[1:]
    assert here[0] != in_script[0] or "PYTHONHASHSEED" in os.environ


@pytest.mark.slow  # an interpreter of its own, which loads torch
def test_a_spawned_process_with_another_hash_seed_finds_the_same_digests(
    script: str,
) -> None:
    in_script, spawned = told(script, "spawn")
    assert spawned[0] != in_script[0]
    assert spawned[1:] == in_script[1:]
    assert spawned[2] == cache_things.digests()


def test_all_kinds_differ() -> None:
    digests = cache_things.digests()
    assert len({*digests.values()}) == len(digests)


simple = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(max_size=3)
    | st.binary(max_size=3)
)
values = st.recursive(
    simple,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(simple, inner, max_size=3)
        | st.sets(simple, max_size=3)
        | st.frozensets(simple, max_size=3)
    ),
    max_leaves=12,
)


def spelled(value: Any) -> Any:
    """Return a value as types and texts, which are equal exactly for equal values."""
    kind = type(value).__name__
    if isinstance(value, list | tuple):
        return kind, [spelled(item) for item in value]
    if isinstance(value, dict):
        return kind, [(spelled(k), spelled(v)) for k, v in value.items()]
    if isinstance(value, set | frozenset):
        return kind, sorted(repr(spelled(item)) for item in value)
    return kind, repr(value)


@given(values, values)
def test_digests_are_equal_exactly_for_equal_values(one: Any, other: Any) -> None:
    assert (of(one) == of(other)) == (spelled(one) == spelled(other))


@given(values)
def test_a_copy_has_the_same_digest(value: Any) -> None:
    def copied(part: Any) -> Any:
        if isinstance(part, dict):
            return {copied(k): copied(v) for k, v in part.items()}
        if isinstance(part, list | tuple | set | frozenset):
            return type(part)(copied(item) for item in part)
        return part

    assert of(copied(value)) == of(value)


ALIKE = [
    [0, False, 0.0, -0.0, 0j, "0", b"0", None, "", b"", (), [], {}, set(), frozenset()],
    [[[1], 2], [1, [2]], [[1, 2]], [1, 2], [[1], [2]], (1, 2), [(1, 2)], [[], 1, 2]],
    [["ab", "c"], ["a", "bc"], ["abc"], ["abc", ""], ["", "abc"], [b"ab", b"c"]],
    [[("a", 1)], [["a", 1]], [("a",), (1,)], [("a", 1), ("a", 1)], [("a", 1, None)]],
    [
        {1: 2, 3: 4},
        {3: 4, 1: 2},
        {1: 2},
        {2: 1},
        {"1": 2},
        {(1,): 2},
        {None: 2},
        [(1, 2)],
        {1: 2, 2: 1},
    ],
    [[True], [1], [1.0], ["1"], [None], [[None]], [...], [1, None], [None, 1]],
    [np.zeros(2), np.zeros((1, 2)), np.zeros(2, "f4"), np.zeros(2, "i8"), np.ones(2)],
    [np.float64(1), 1.0, np.float32(1), np.array(1.0), np.int64(1), torch.tensor(1.0)],
    [np.array([1, None]), np.array([1, 2], object), np.array(["a"]), np.array([b"a"])],
    [torch.zeros(2), torch.zeros(2, dtype=torch.int32), torch.zeros(1, 2), [0.0, 0.0]],
    [Row("a"), Row("a", 1), ("a", 0), Point(1.0), Point(2.0), Point(1.0, ["a"])],
    [Color.RED, Color.BLUE, "blue", 1, Color],
    [Scale(1), Scale(2), Scale(1, 2), Scale],
    [Compose([]), Compose([len]), Compose([abs]), Compose([len, abs])],
    [OrderedDict(a=1, b=2), OrderedDict(b=2, a=1), {"a": 1, "b": 2}],
    [defaultdict(list), defaultdict(dict), {}],
    [len, "len", abs, "a".upper, "b".upper, "a".lower, str.upper, math.floor],
    [np.random.default_rng(0), np.random.default_rng(1), np.random.RandomState(0)],
    [torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)],
    [functools.partial(max), functools.partial(max, 1), functools.partial(max, key=1)],
    [range(3), range(4), slice(3), slice(4), Path("3"), "3"],
    [Stamped("a"), Stamped("b")],
    [itemgetter(1), itemgetter("1"), attrgetter("a"), methodcaller("a"), [itemgetter]],
]


@pytest.mark.parametrize("group", ALIKE, ids=lambda group: repr(group[0])[:20])
def test_values_that_only_look_alike_differ(group: list[Any]) -> None:
    assert len({of(value) for value in group}) == len(group)


def test_the_memory_layout_of_an_array_does_not_count() -> None:
    array = np.arange(12.0).reshape(3, 4)
    assert of(np.asfortranarray(array)) == of(array)
    assert of(np.repeat(array, 2, axis=1)[:, ::2]) == of(array)
    tensor = torch.arange(12.0).reshape(3, 4)
    assert of(tensor.T.contiguous().T) == of(tensor)


def test_a_memory_map_counts_by_its_content(tmp_path: Path) -> None:
    array = np.arange(10)
    np.save(tmp_path / "a.npy", array)
    assert of(np.load(tmp_path / "a.npy", mmap_mode="r")) == of(array)


def test_shared_and_copied_values_have_the_same_digest() -> None:
    value = {"a": [1, [2, {3}]]}
    copies = [{"a": [1, [2, {3}]]} for _ in range(3)]
    assert of([value] * 3) == of(copies)


def test_a_web_of_shared_values_is_walked_once() -> None:
    web: Any = [[1, "a"]]
    for _ in range(80):
        web = [web, web]
    assert of(web) == of(web)


def test_cycles_end_and_count() -> None:
    def ring(last: int) -> list[Any]:
        start: list[Any] = [1]
        start.append([start, last])
        return start

    assert of(ring(1)) == of(ring(1))
    assert of(ring(1)) != of(ring(2))
    parent, child = Compose([]), Compose([])
    parent.transforms.append(child)
    child.transforms.append(parent)
    assert of(parent) == of(parent)


def test_no_value_is_too_deep() -> None:
    def nested(depth: int) -> Any:
        deep: Any = []
        for _ in range(depth):
            deep = [deep]
        return deep

    assert of(nested(2000)) == of(nested(2000)) != of(nested(2001))


@settings(max_examples=40)
@given(st.lists(st.tuples(*[st.integers(0, 3)] * 2), min_size=4, max_size=4))
def test_cycles_differ_exactly_where_following_them_differs(
    arrows: list[tuple[int, int]],
) -> None:
    def made(at: int, tag: int) -> list[Any]:
        places: list[list[Any]] = [[number % 2] for number in range(4)]
        places[0].append(tag)
        for place, arrow in zip(places, arrows, strict=True):
            place += [places[end] for end in arrow]
        return places[at]

    def seen(value: list[Any], steps: int) -> Any:
        return [
            seen(item, steps - 1) if isinstance(item, list) else item
            for item in value
            if steps
        ]

    roots = [made(at, tag) for at in range(4) for tag in (0, 1)]
    looks = [(of(root), seen(root, 8)) for root in roots]
    for (one, seen_of_one), (other, seen_of_other) in product(looks, repeat=2):
        assert (one == other) == (seen_of_one == seen_of_other)


SPARSE = "Tensor of a special kind (torch.sparse_coo)"


def generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("value", "path", "what"),
    [
        (threading.Lock(), "data", "lock"),
        ([1, {"a": generator()}], "data[1]['a']", "generator"),
        (Compose([generator()]), "data.transforms[0]", "generator"),
        (functools.partial(max, threading.RLock()), "data.args[0]", "RLock"),
        (
            [torch.ones(2).to_sparse()],
            "data[0]",
            SPARSE,
        ),
        ({"t": threading.Event()}, "data['t']._cond._lock", "lock"),
        ({1, 2, threading.Lock()}, "data[...]", "lock"),
        ({Row("a"): ctypes.pointer(ctypes.c_int(1))}, "data[Row]", "LP_c_int"),
        ([sys._getframe()], "data[0]", "frame"),  # noqa: SLF001 - it has no other name
        (Compose([weakref.ref(Compose([]))]), "data.transforms[0]", "ReferenceType"),
    ],
)
def test_the_error_names_the_place_of_the_value(
    value: Any, path: str, what: str
) -> None:
    with pytest.raises(Undigestible) as raised:
        digest(value, "data")
    assert (raised.value.path, raised.value.what) == (path, what)
    assert str(raised.value).startswith(f"{path} is a {what}")


def test_an_open_file_two_levels_down_is_named() -> None:
    with open(__file__) as file, pytest.raises(Undigestible) as raised:
        digest(Handles(file), "dataset")
    assert raised.value.path == "dataset.files['train'][0]"
    assert raised.value.what == "TextIOWrapper"


def test_a_lock_in_a_closure_is_named() -> None:
    lock = threading.Lock()

    def decode(value: Any) -> Any:
        with lock:
            return value

    with pytest.raises(Undigestible) as raised:
        digest(decode, "decode")
    assert raised.value.path == "decode.__closure__['lock']"


def test_a_subclass_of_a_c_type_does_not_count_by_attributes_alone() -> None:
    class Counting(threading.local):
        pass

    with pytest.raises(Undigestible):
        of(Counting())


def test_only_what_an_object_says_of_itself_counts() -> None:
    assert of(Stamped("a", "here")) == of(Stamped("a", "there"))
    assert of(Stamped("a")) == of(Stamped(b"a"))
    with pytest.raises(TypeError, match="must be a str or bytes"):
        of(Stamped(1))


def test_a_users_own_package_may_be_called_datasets(
    load: Callable[..., types.ModuleType],
) -> None:
    code = "class Mine:\n    def __penstock_fingerprint__(self): return self.said"
    kind = load(code, "datasets.mine").Mine

    def made(text: str) -> Any:
        instance = kind()
        vars(instance).update(said=text, lock=threading.Lock())
        return instance

    assert of(made("a")) == of(made("a"))
    assert of(made("a")) != of(made("b"))


def test_a_method_is_not_mistaken_for_an_array_of_its_name(
    load: Callable[..., types.ModuleType],
) -> None:
    code = "import numpy as np\ncrop = np.ones(2)\nclass C:\n    def crop(self): pass"
    module = load(code)
    assert of(module.C().crop) == of(module.C().crop)


def test_a_wrapper_differs_from_what_it_wraps() -> None:
    class Wrapper:
        def __init__(self, inner: Any, size: int) -> None:
            self.inner = inner
            self.size = size

        def __getattr__(self, name: str) -> Any:
            return getattr(self.__dict__["inner"], name)

    assert of(Wrapper(Stamped("a"), 1)) != of(Wrapper(Stamped("a"), 2))


def test_a_hugging_face_dataset_counts_by_its_fingerprint(
    load: Callable[..., types.ModuleType],
) -> None:
    kind = load("class Dataset: pass", "datasets.arrow_dataset").Dataset

    def made(fingerprint: str) -> Any:
        dataset = kind()
        vars(dataset).update(_fingerprint=fingerprint, table=threading.Lock())
        return dataset

    assert of(made("a")) == of(made("a"))
    assert of(made("a")) != of(made("b"))
