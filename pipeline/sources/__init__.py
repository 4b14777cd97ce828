"""Where samples come from.

source.py         Source: the interface of all sources that penstock reads itself
folder.py         class folders of images on this machine
files.py          files anywhere, through fsspec; class folders in a store
lmdb_records.py   values of an LMDB database
tar_shards.py     WebDataset shards, indexed
remote_shards.py  WebDataset shards of a store
tar_index.py      where the samples of a tar file lie
columnar.py       rows of Parquet and Arrow files
paths.py          the local files that a path or pattern names
per_process.py    values that each process opens for itself
patience.py       limits of remote reads: retries, time, size, bandwidth
hedging.py        second requests for late reads
datasets.py       the user's datasets, lists, arrays and iterables
"""
