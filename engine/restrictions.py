"""Restrictions: why a setting stays as it is, although another one is wanted."""

from __future__ import annotations

from enum import StrEnum


class Restriction(StrEnum):
    """Every one, in the words of `explain()` and of the log.

    Each says what would allow the change, if anything does. Most have one field, for
    `format`.
    """

    # What the program says
    PINNED = "the stage has tune=False"
    GIVEN = 'executor="{}" was given, and "auto" allows others'
    BOUNDED = "it is limited to {}"
    ALONE = (
        "one worker was requested and stays alone, because {};"
        " num_parallel_workers=2 allows more"
    )
    HOSTED = 'options(host="{}") was given, and "auto" allows another'
    ZERO = "{}, but the program says `{}`; leave that out to let workers load"
    SAMPLER = (
        "the sampler is the program's own, and with workers it would be asked ahead of"
        " time, before it can see what the loop does meanwhile; set num_workers"
        " yourself if that is acceptable"
    )
    # What samples are made of
    ITERABLE = (
        "one worker reads an iterable, in order (keep it cheap, and do the rest of the"
        " work in .map())"
    )
    SHARED = (
        "{}, so several workers would get wrong samples or the same draws; create it on"
        " first use, so that every worker has its own, and set num_parallel_workers, or"
        " pass from_dataset(thread_safe=True) if threads may share it"
    )
    CHANGES_THERE = (
        "`{}` changes there while samples are made, and each other worker would change"
        " its own copy"
    )
    CHANGES = (
        "`{}` changes while samples are made, and each worker would change its own"
        " copy; set the number of workers yourself if that is acceptable"
    )
    BELONGS = (
        "{} does not work in workers that share it, or have copies; create it on first"
        " use, so that each worker has its own, and set the number of workers yourself"
    )
    DREW = (
        "it draws from a global random generator, and each worker would draw from its"
        " own; draw from `rng`, or set the number of workers yourself if that is"
        " acceptable"
    )
    GRADIENTS = (
        "its samples carry gradients, which would end in the workers; set the number of"
        " workers yourself if that is acceptable"
    )
    # What this machine allows
    FORKLESS = "worker processes cannot be forked here"
    TRIED = "worker processes were tried lately, and were no faster"
    TRIED_MORE = "more workers were tried lately, and were no faster"
    MEMORY = "the memory budget has no room for more batches"


def is_chosen(why: str) -> bool:
    """Whether the program chose it, and may choose otherwise without harm."""
    return why.startswith(("executor=", "options("))
