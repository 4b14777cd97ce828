"""MindSpore's datasets, for scripts that were written for them.

    import penstock.mindspore as ds          # was: import mindspore.dataset as ds

    data = ds.GeneratorDataset(source, ["image", "label"], shuffle=True)
    data = data.map(augment, input_columns="image").batch(32, drop_remainder=True)
    for row in data.create_dict_iterator():
        ...

This is a thin layer over `penstock.Pipeline`, with the calls that most scripts need.
Other calls raise an error that names penstock's equivalent.
"""

from typing import Any

from . import transforms, vision
from .dataset import (
    Dataset,
    GeneratorDataset,
    ImageFolderDataset,
    config,
    missing_dataset,
)

__all__ = [
    "Dataset",
    "GeneratorDataset",
    "ImageFolderDataset",
    "config",
    "transforms",
    "vision",
]


def __getattr__(name: str) -> Any:
    raise AttributeError(missing_dataset(name))
