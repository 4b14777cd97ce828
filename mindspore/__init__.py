"""MindSpore's datasets, for scripts that were written for them.

    import penstock.mindspore as ds          # was: import mindspore.dataset as ds

    data = ds.GeneratorDataset(source, ["image", "label"], shuffle=True)
    data = data.map(augment, input_columns="image").batch(32, drop_remainder=True)
    for row in data.create_dict_iterator():
        ...

This is a thin layer over `penstock.Pipeline`, with the calls that most scripts need.
Other calls raise an error that names penstock's equivalent.
"""

from importlib import import_module
from typing import Any

from .batches import BatchInfo
from .dataset import Dataset, serialize, zipped
from .generator import GeneratorDataset, NumpySlicesDataset, PaddedDataset
from .images import (
    Cifar10Dataset,
    Cifar100Dataset,
    CocoDataset,
    ImageFolderDataset,
    MnistDataset,
    VOCDataset,
)
from .mindrecord import MindDataset
from .records import TextFileDataset, TFRecordDataset
from .samplers import (
    DistributedSampler,
    PKSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    SubsetSampler,
    WeightedRandomSampler,
)
from .settings import INSTEAD, Config, DatasetCache, Schema, Shuffle, instead

__all__ = [
    "BatchInfo",
    "Cifar10Dataset",
    "Cifar100Dataset",
    "CocoDataset",
    "Dataset",
    "DatasetCache",
    "DistributedSampler",
    "GeneratorDataset",
    "ImageFolderDataset",
    "MindDataset",
    "MnistDataset",
    "NumpySlicesDataset",
    "PKSampler",
    "PaddedDataset",
    "RandomSampler",
    "Sampler",
    "Schema",
    "SequentialSampler",
    "Shuffle",
    "SubsetRandomSampler",
    "SubsetSampler",
    "TFRecordDataset",
    "TextFileDataset",
    "VOCDataset",
    "WeightedRandomSampler",
    "config",
    "serialize",
    "zip",
]

config = Config()
zip = zipped  # noqa: A001 MindSpore's name


def __getattr__(name: str) -> Any:
    if name in ("transforms", "vision"):  # scripts say ds.vision, and do not import it
        return import_module(f".{name}", __name__)
    raise AttributeError(instead(name, INSTEAD))
