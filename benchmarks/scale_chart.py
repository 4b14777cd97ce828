"""Draws the predicted efficiency of many nodes, beside figures published by others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import inf, log2
from typing import NamedTuple

from penstock.autotune.planner import Cluster, Tier, normal_steps

__all__ = ["draw", "predicted", "table"]

COUNTS = tuple(1 << power for power in range(11))
BETWEEN = 2
"""Points of a curve between one of these and the next."""
DRAWN = tuple(
    round(2 ** (at / BETWEEN)) for at in range(BETWEEN * (len(COUNTS) - 1) + 1)
)
DEVICES = 8
"""Devices of a node."""
ROWS_PER_S = 885.5
"""ResNet-50 on one V100: MoXing's scaling table, one GPU."""
BATCH = 256
"""Batch size of a device."""
PHOTO_BYTES = 110e3
"""Mean size of ImageNet's files."""
PHOTOS = 1_281_167
CORES = 64
CORE_ROWS_PER_S = 583.0
"""Photos decoded, cropped and resized by one of this machine's cores: half of what
benchmarks/imagenet_folder.py measured on two."""
RAM = 32e9
DISK = 256e9
DISK_BYTES_PER_S = 2e9
SMALL, LARGE = 10e9, 100e9
"""Bandwidth of the stores in bytes per second."""
SPREAD, WIDE_SPREAD = 0.03, 0.1
"""Standard deviation of a node's steps, relative."""

PUBLISHED = (
    ("MoXing: 0.8 at 1,000 devices", 1000 / DEVICES, 0.8),
    ("MoXing's table: 0.91 at 128 devices", 128 / DEVICES, 85_993.1 / (16 * 5_906.6)),
)
"""Nodes and efficiency, if the number of nodes is known."""
AWS = 0.85
"""BERT and Mask R-CNN at AWS: the number of nodes is not given."""

WIDTH, HEIGHT = 860, 420
LEFT, RIGHT, TOP, BOTTOM = 60, 300, 20, 50
COLOURS = ("#009e73", "#0072b2", "#56b4e9", "#d55e00", "#cc79a7")
"""Colors that colour-blind readers can distinguish, too (Okabe and Ito, 2008)."""
INK, PAPER, FAINT = "#333333", "#ffffff", "#dddddd"


class Curve(NamedTuple):
    """One line of the picture."""

    label: str
    what: Cluster
    warm: bool = False


def node(
    store_bytes_per_s: float,
    *,
    spread: float = SPREAD,
    tiers: tuple[Tier, ...] = (),
    own_parts: bool = True,
) -> Cluster:
    """Return the node that all curves are for."""
    return Cluster(
        normal_steps(BATCH / ROWS_PER_S, spread),
        batch_rows=DEVICES * BATCH,
        row_bytes=PHOTO_BYTES,
        node_rows_per_s=CORES * CORE_ROWS_PER_S,
        store_bytes_per_s=store_bytes_per_s,
        data_bytes=PHOTOS * PHOTO_BYTES,
        tiers=tiers,
        own_parts=own_parts,
    )


IN_RAM = (Tier(RAM),)
ON_DISK = (Tier(RAM), Tier(DISK, DISK_BYTES_PER_S))
CURVES = (
    Curve(
        "10 GB/s, later epochs: RAM and disk keep all",
        node(SMALL, tiers=ON_DISK, own_parts=False),
        warm=True,
    ),
    Curve("100 GB/s, first epoch", node(LARGE)),
    Curve(
        "10 GB/s, later epochs: RAM keeps a quarter",
        node(SMALL, tiers=IN_RAM, own_parts=False),
        warm=True,
    ),
    Curve("10 GB/s, first epoch", node(SMALL)),
    Curve("data for free, steps vary by 10 %", node(inf, spread=WIDE_SPREAD)),
)


Values = Sequence[Sequence[float]]
"""The efficiencies of each curve, at `DRAWN`."""


def predicted() -> Values:
    """Return the curves to draw."""
    return [
        [curve.what.speed(n, warm=curve.warm).efficiency for n in DRAWN]
        for curve in CURVES
    ]


def table(values: Values) -> str:
    """Return the curves as rows of Markdown."""
    head = "| nodes | " + " | ".join(curve.label for curve in CURVES) + " |"
    columns = [heights[::BETWEEN] for heights in values]
    rows = [
        f"| {nodes:,} | " + " | ".join(f"{value:.2f}" for value in row) + " |"
        for nodes, *row in zip(COUNTS, *columns, strict=True)
    ]
    return "\n".join([head, "|---" * (1 + len(CURVES)) + "|", *rows])


def draw(values: Values) -> str:
    """Return the picture, as SVG."""
    shapes = [*_frame(), *_curves(values), *_published()]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        f' font-family="sans-serif" font-size="12" fill="{INK}">\n'
        "<title>Efficiency of 1 to 1,024 nodes in step</title>\n"
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>\n'
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


def _x(nodes: float) -> float:
    width = WIDTH - LEFT - RIGHT
    return round(LEFT + width * log2(nodes) / log2(COUNTS[-1]), 1)


def _y(efficiency: float) -> float:
    return round(TOP + (HEIGHT - TOP - BOTTOM) * (1.0 - efficiency), 1)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(path: str, colour: str, extra: str = "") -> str:
    return f'<path d="{path}" stroke="{colour}" fill="none"{extra}/>'


def _frame() -> Iterator[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    for fifth in range(6):
        y = _y(fifth / 5)
        yield _line(f"M{LEFT},{y}H{right}", FAINT)
        yield _text(LEFT - 8, y + 4, f"{fifth / 5:.1f}", "end")
    for nodes in COUNTS:
        yield _text(_x(nodes), bottom + 18, f"{nodes:,}", "middle")
    middle = (LEFT + right) / 2
    yield _text(middle, HEIGHT - 10, "nodes of eight devices", "middle")
    yield _text(LEFT, TOP - 6, "efficiency")


def _curves(values: Values) -> Iterator[str]:
    curves = zip(CURVES, COLOURS, values, strict=True)
    for at, (curve, colour, heights) in enumerate(curves):
        places = zip(DRAWN, heights, strict=True)
        path = "M" + "L".join(f"{_x(nodes)},{_y(value)}" for nodes, value in places)
        yield _line(path, colour, ' stroke-width="2"')
        yield from _legend(at, curve.label, f'<path d="M0,0H18" stroke="{colour}"')


def _legend(at: int, label: str, shape: str) -> Iterator[str]:
    x, y = WIDTH - RIGHT + 16, TOP + 12 + 24 * at
    yield f'<g transform="translate({x},{y - 4})">{shape} stroke-width="2"/></g>'
    yield _text(x + 26, y, label)


def _published() -> Iterator[str]:
    """Draw others' figures: points, and a line if the number of nodes is not given."""
    after = len(CURVES)
    for at, (label, nodes, value) in enumerate(PUBLISHED):
        fill = INK if at == 0 else PAPER
        mark = f'r="4" fill="{fill}" stroke="{INK}"'
        yield f'<circle cx="{_x(nodes)}" cy="{_y(value)}" {mark}/>'
        yield from _legend(after + at, label, f'<circle cx="9" cy="0" {mark}')
    dashes = 'stroke-dasharray="5 4"'
    yield _line(f"M{LEFT},{_y(AWS)}H{WIDTH - RIGHT}", INK, f" {dashes}")
    shape = f'<path d="M0,0H18" stroke="{INK}" {dashes}'
    yield from _legend(after + len(PUBLISHED), "AWS: 0.85, BERT and Mask R-CNN", shape)
