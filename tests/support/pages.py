"""What a report's page has packed for its script."""

from __future__ import annotations

import base64
import gzip
import json
import re
from typing import Any


def ranks_in(page: str) -> list[dict[str, Any]]:
    """Return what is drawn of each rank."""
    packed = re.search(r'<script id="packed"[^>]*>([^<]*)</script>', page)
    assert packed
    content = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    ranks: list[dict[str, Any]] = content["ranks"]
    return ranks
