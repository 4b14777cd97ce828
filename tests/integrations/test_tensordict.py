"""A TensorDict is a table of its tensors, and a dataset for the DataLoader."""

from __future__ import annotations

import pytest
import torch
import torch.utils.data as torchs

import penstock as ps

tensordict = pytest.importorskip("tensordict")
pytestmark = pytest.mark.slow
ROWS = 50
COLUMNS = {"x": torch.rand(ROWS, 3), "at": torch.arange(ROWS, dtype=torch.int32)}


def test_a_tensordict_is_batched_by_column() -> None:
    data = tensordict.TensorDict(COLUMNS, [ROWS])
    with ps.Pipeline.from_dataset(data).shuffle(seed=1).batch(8) as pipe:
        batches = list(pipe)
    rows = torch.cat([batch["at"] for batch in batches])
    assert sorted(rows.tolist()) == [*range(ROWS)]
    for batch in batches:
        assert batch["at"].dtype == torch.int32
        assert torch.equal(batch["x"], COLUMNS["x"][batch["at"]])


def test_a_nested_tensordict_is_refused_with_the_cure() -> None:
    data = tensordict.TensorDict({"in": COLUMNS}, [ROWS])
    with pytest.raises(ps.errors.SpecError, match="dict of columns"):
        ps.Pipeline.from_dataset(data)
    flat = data.flatten_keys()
    with ps.Pipeline.from_dataset(flat).batch(ROWS) as pipe:
        (batch,) = pipe
    assert torch.equal(batch["in.x"], COLUMNS["x"])


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_yields_the_tensordicts_that_torchs_does(workers: int) -> None:
    data = tensordict.TensorDict({**COLUMNS, "in": COLUMNS}, [ROWS])
    pairs = zip(
        torchs.DataLoader(data, 8, num_workers=workers),
        ps.DataLoader(data, 8, num_workers=workers),
        strict=True,
    )
    for theirs, ours in pairs:
        assert type(ours) is type(theirs)
        assert (ours == theirs).all()
