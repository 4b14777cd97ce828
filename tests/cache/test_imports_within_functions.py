"""What a function imports when it runs counts as what a module imports does."""

from __future__ import annotations

import json

from penstock.cache.fingerprint import imported, release


def test_an_import_of_a_library_counts_by_its_version_alone() -> None:
    assert imported("torch.nn", ("Linear",), 0, {}) == {
        "import torch.nn": release("torch")
    }
    assert release("json") is not None
    assert imported("json", ("loads",), 0, {}) == {"import json": release("json")}


def test_a_relative_import_is_never_a_librarys() -> None:
    space = {"__package__": "json", "__name__": "json.user", "__spec__": None}
    imports = imported("decoder", ("JSONDecoder",), 1, space)
    assert imports == {"import .decoder JSONDecoder": json.decoder.JSONDecoder}


def test_an_import_that_fails_counts_as_one() -> None:
    assert imported("no_such_module", (), 0, {}) == {
        "import no_such_module": "cannot be imported"
    }
