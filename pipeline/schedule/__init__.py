"""Values that change during training: batch and image size, momentum, learning rate.

    ps.schedule.policy("20:128-224,38:224-224,40:288-128")
    ps.schedule.of(
        batch_size=ps.schedule.steps({0: 64, 30: 128, 60: 256}),       # of one rank
        image_size=ps.schedule.linear(128, 224, end=38, multiple_of=32),
        coupling="linear",
    )

Each value takes effect at an exact batch, on every rank, however much is prefetched.
Functions get image size and strength from `ctx`. The stamp of the batch holds the other
values; `ps.optim.follow` sets them in an optimiser.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import SpecError, check
from .curves import Constant, Curve, Function, Ramp, Stages, Unit, as_curve
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
        unit: the unit of the starts: "samples", "steps" or "epochs".
    """
    starts = sorted(table)
    return Stages(tuple(starts), tuple(table[start] for start in starts), unit)


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
        unit: "samples", "steps" or "epochs"; fractions of an epoch are allowed.
        multiple_of: round down to a multiple of this; sizes need it.
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
    """Return the curve that goes from one value to another along half a cosine.

    Its arguments are those of `linear`. I. Loshchilov, F. Hutter, arXiv:1608.03983.
    """
    return Ramp(first, last, begin, end, unit, multiple_of, "cosine")


def function(
    f: Callable[[int], float], unit: Unit = "epochs", *, until: int | None = None
) -> Curve:
    """Return the curve `f(n)`, after n samples, steps or epochs.

    Args:
        f: a pure function: it returns the same on every rank and at every call.
        unit: the unit of n.
        until: the count after which the value stays; required for a batch size.
    """
    return Function(f, unit, until)


def stages(
    *rows: Mapping[str, Any], unit: Unit = "epochs", **settings: Any
) -> Scheduled:
    """Return the schedule of a table of stages.

    Args:
        *rows: one row per stage: `{"until": 20, "batch_size": 224, "image_size": 128,
            ...}`; a value that a row leaves out stays what it was in the row before.
            The last row holds forever.
        unit: the unit of `until`.
        **settings: as `of` takes them.
    """
    starts = [0.0, *(float(row["until"]) for row in rows[:-1])]
    names = {name for row in rows for name in row} - {"until"}
    curves: dict[str, Any] = {}
    for name in sorted(names):
        check(
            rows and name in rows[0],
            f"the first stage must set `{name}`, because a later stage does; got"
            f" {rows[:1]!r}",
        )
        table, value = {}, None
        for start, row in zip(starts, rows, strict=True):
            value = row.get(name, value)
            table[start] = value
        curves[name] = steps(table, unit)
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
    end_epoch: float | None = None,
) -> Scheduled:
    """Return a schedule.

    Args:
        batch_size: samples in a batch of one data-parallel rank.
        global_batch_size: samples in a batch of all ranks; use it instead of
            `batch_size`.
        image_size: side in pixels: `ctx.image_size`.
        momentum: momentum of the optimiser, 0 to 1.
        lr_mult: factor on the learning rate.
        strength: strength of augmentation: `ctx.strength`.
        coupling: factor on the learning rate for a batch B instead of the base batch
            B0: "linear" B / B0, "sqrt" (B / B0) ** 0.5, a power a (B / B0) ** a.
        base_batch: B0, in the same terms as the batch size; None: the first batch size.
        end_epoch: where training ends; `preview` shows what happens up to there.

    Raises:
        SpecError: there is no batch size or there are two, or a value is neither a
            number nor a curve.
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
        end_epoch=end_epoch,
    )


def policy(
    text: str,
    *,
    coupling: Coupling = "none",
    momentum: float | Curve | None = None,
    lr_mult: float | Curve | None = None,
) -> Scheduled:
    """Return the schedule of a policy string: `"20:128-224,38:224-224,40:288-128"`.

    This is the format of ModelArts MoXing. Up to epoch 20, the example has images of
    128 px in batches of 224, up to 38 of 224 px in batches of 224, and up to 40 of 288
    px in batches of 128.

    Args:
        text: stages divided by commas, each `end epoch : image size - batch size of one
            rank`. The last stage also holds after its end.
        coupling: coupling of the learning rate to the batch size, as in `of`.
        momentum: momentum of the optimiser.
        lr_mult: factor on the learning rate, times that of the coupling.

    Raises:
        SpecError: `text` is not a policy string, or its epochs do not increase.
    """
    found: list[tuple[int, int, int]] = []
    for part in str(text).split(","):
        match = STAGE.fullmatch(part)
        if match is None:
            raise SpecError(f"{part!r} is no stage of a policy; {EXAMPLE}")
        end, image, batch = map(int, match.groups())
        check(
            end > (found[-1][0] if found else 0) and min(image, batch) >= 1,
            f"the stages of a policy must end one after the other, with sizes of 1"
            f" or more, got {part.strip()!r} in {text!r}; {EXAMPLE}",
        )
        found.append((end, image, batch))
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


STAGE = re.compile(r"\s*(\d+)\s*:\s*(\d+)\s*-\s*(\d+)\s*")
EXAMPLE = 'write "END_EPOCH:IMAGE-BATCH,...", as in "20:128-224,38:224-224"'


def optional(name: str, value: object) -> Curve | None:
    """Return a value as a curve; None if it is not scheduled."""
    return None if value is None else as_curve(name, value)
