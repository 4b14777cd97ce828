"""What changes while a model trains: batch and image size, momentum, learning rate.

    ps.schedule.policy("20:128-224,38:224-224,40:288-128")
    ps.schedule.of(
        batch_size=ps.schedule.steps({0: 64, 30: 128, 60: 256}),       # of one rank
        image_size=ps.schedule.linear(128, 224, end=38, multiple_of=32),
        coupling="linear",
    )

Each is in force from an exact batch on, on every rank, however much is prefetched.
Image size and strength reach functions by `ctx`, the rest is in the stamp of the batch;
`ps.optim.follow` puts it into an optimiser.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...errors import check
from .curves import Constant, Curve, Function, Ramp, Stages, Unit, as_curve, table_of
from .policy import parse
from .scheduled import Coupling, Scheduled

__all__ = [
    "Curve",
    "Scheduled",
    "constant",
    "cosine",
    "function",
    "linear",
    "of",
    "policy",
    "stages",
    "steps",
]


def constant(value: float) -> Curve:
    """Return the curve that is `value` throughout."""
    return Constant(value)


def steps(table: Mapping[float, float], unit: Unit = "epochs") -> Curve:
    """Return the curve that takes another value from each start on.

    Args:
        table: `{start: value}`; the first start is 0.
        unit: what starts are counted in: "samples", "steps" or "epochs".
    """
    return table_of(table, unit)


def linear(
    first: float,
    last: float,
    *,
    end: float,
    begin: float = 0,
    unit: Unit = "epochs",
    multiple_of: int | None = None,
) -> Curve:
    """Return the curve that goes straight from one value to another.

    Args:
        first: the value up to `begin`.
        last: the value from `end` on.
        end: in `unit`.
        begin: in `unit`.
        unit: "samples", "steps" or "epochs"; parts of an epoch are allowed.
        multiple_of: rounds down; sizes need it.
    """
    return Ramp(first, last, begin, end, unit, multiple_of)


def cosine(
    first: float,
    last: float,
    *,
    end: float,
    begin: float = 0,
    unit: Unit = "epochs",
    multiple_of: int | None = None,
) -> Curve:
    """Return the curve that goes from one value to another as half a cosine does.

    Its arguments are those of `linear`. I. Loshchilov, F. Hutter, arXiv:1608.03983.
    """
    return Ramp(first, last, begin, end, unit, multiple_of, "cosine")


def function(
    f: Callable[[int], float], unit: Unit = "epochs", *, until: int | None = None
) -> Curve:
    """Return the curve that is `f(n)`, n samples, steps or epochs being over.

    Args:
        f: pure: the same on every rank, whenever it is asked.
        unit: what n counts.
        until: from where on the value stays; needed where it gives the batch size.
    """
    return Function(f, unit, until)


def stages(
    *rows: Mapping[str, Any], unit: Unit = "epochs", **settings: Any
) -> Scheduled:
    """Return the schedule of a table of stages.

    Args:
        *rows: one a stage: `{"until": 20, "batch_size": 224, "image_size": 128, ...}`;
            a value that a row leaves out stays what it was in the row before. The last
            row holds forever.
        unit: of `until`.
        **settings: as `of` takes them.
    """
    starts = [0.0, *(float(row["until"]) for row in rows[:-1])]
    names = {name for row in rows for name in row} - {"until"}
    curves: dict[str, Any] = {}
    for name in sorted(names):
        check(
            rows and name in rows[0],
            f"the first stage must say `{name}`, as a later one does; got {rows[:1]!r}",
        )
        table, value = {}, None
        for start, row in zip(starts, rows, strict=True):
            value = row.get(name, value)
            table[start] = value
        curves[name] = table_of(table, unit)
    return of(**curves, **settings)


def of(
    batch_size: float | Curve | None = None,
    *,
    global_batch_size: float | Curve | None = None,
    image_size: float | Curve | None = None,
    momentum: float | Curve | None = None,
    lr_mult: float | Curve | None = None,
    strength: float | Curve | None = None,
    coupling: Coupling = "none",
    base_batch: int | None = None,
) -> Scheduled:
    """Return a schedule.

    Args:
        batch_size: samples of a batch, of one data-parallel rank.
        global_batch_size: of all ranks together, instead.
        image_size: pixels a side: `ctx.image_size`.
        momentum: of the optimiser, 0 to 1.
        lr_mult: factor on the learning rate.
        strength: of augmentation: `ctx.strength`.
        coupling: factor on the learning rate where the batch is B and not the base
            batch B0: "linear" B / B0, "sqrt" (B / B0) ** 0.5, a power a (B / B0) ** a.
        base_batch: B0, counted as the batch size is given; None: the first.

    Raises:
        SpecError: no batch size or two, or a value that is neither number nor curve.
    """
    given = batch_size if global_batch_size is None else global_batch_size
    check(
        (batch_size is None) != (global_batch_size is None),
        "a schedule needs `batch_size`, of one rank, or `global_batch_size`, of"
        f" all; got {batch_size!r} and {global_batch_size!r}",
    )
    return Scheduled(
        as_curve("batch_size", given),
        global_batch_size is None,
        image_size=optional("image_size", image_size),
        momentum=optional("momentum", momentum),
        lr_mult=optional("lr_mult", lr_mult),
        strength=optional("strength", strength),
        coupling=coupling,
        base_batch=base_batch,
    )


def policy(
    text: str,
    *,
    coupling: Coupling = "none",
    momentum: float | Curve | None = None,
    lr_mult: float | Curve | None = None,
) -> Scheduled:
    """Return the schedule of a policy string: `"20:128-224,38:224-224,40:288-128"`.

    Args:
        text: stages, each `end epoch : image size - batch size of one rank`. The last
            one holds beyond its end, too.
        coupling: of the learning rate to the batch size, as `of` takes it.
        momentum: of the optimiser.
        lr_mult: factor on the learning rate, times that of the coupling.

    Raises:
        SpecError: it is no policy string.
    """
    found = parse(text)
    starts = (0.0, *(float(end) for end, _, _ in found[:-1]))
    return Scheduled(
        Stages(starts, tuple(batch for _, _, batch in found), "epochs"),
        per_rank=True,
        image_size=Stages(starts, tuple(image for _, image, _ in found), "epochs"),
        momentum=optional("momentum", momentum),
        lr_mult=optional("lr_mult", lr_mult),
        coupling=coupling,
        end_epoch=found[-1][0],
    )


def optional(name: str, value: object) -> Curve | None:
    """Return a value as a curve; None where it is not scheduled."""
    return None if value is None else as_curve(name, value)
