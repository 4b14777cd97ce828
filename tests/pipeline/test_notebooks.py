"""What a cell of a notebook shows, as its last line."""

from __future__ import annotations

import penstock as ps


def test_figures_are_tables_and_names_are_escaped() -> None:
    source = ps.Pipeline.from_dataset(list(range(64)), name="<b>digits</b>")
    with source.batch(8) as pipe:
        list(pipe)
        said, stats = pipe.explain(), pipe.stats()
    assert repr(said) == str(said)
    assert "Dataset(ID:0) <b>digits</b>" in repr(said)
    assert "in functions" in repr(stats)
    for shown in (pipe, said, stats):
        html = shown._repr_html_()  # type: ignore[union-attr]
        assert html.startswith("<pre>")
        assert "<b>" not in html
        assert "&lt;b&gt;digits" in html
