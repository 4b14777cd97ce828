"""Policy strings in the format of ModelArts MoXing.

    "20:128-224,38:224-224,40:288-128"

Stages divided by commas, each `end epoch : image size - batch size of one rank`: up to
epoch 20 images of 128 px in batches of 224, up to 38 of 224 px in batches of 224, up to
40 of 288 px in batches of 128.
"""

from __future__ import annotations

import re

from ...errors import SpecError, check

STAGE = re.compile(r"\s*(\d+)\s*:\s*(\d+)\s*-\s*(\d+)\s*")
EXAMPLE = 'write "END_EPOCH:IMAGE-BATCH,...", as in "20:128-224,38:224-224"'

Stage = tuple[int, int, int]
"""End epoch, image size in pixels, batch size of one rank."""


def parse(policy: str) -> list[Stage]:
    """Return the stages of a policy string.

    Raises:
        SpecError: `policy` is not a policy string, or its epochs do not increase.
    """
    stages: list[Stage] = []
    for part in str(policy).split(","):
        match = STAGE.fullmatch(part)
        if match is None:
            raise SpecError(f"{part!r} is no stage of a policy; {EXAMPLE}")
        end, image, batch = map(int, match.groups())
        check(
            end > (stages[-1][0] if stages else 0) and min(image, batch) >= 1,
            f"the stages of a policy must end one after the other, with sizes of 1"
            f" or more, got {part.strip()!r} in {policy!r}; {EXAMPLE}",
        )
        stages.append((end, image, batch))
    return stages
