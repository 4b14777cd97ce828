"""Where samples come from.

source.py         Source: what every source has that penstock reads itself
folder.py         class folders of images on this machine
remote_folder.py  the same in a store
files.py          files anywhere, through fsspec
lmdb_records.py   values of an LMDB database
tar_shards.py     WebDataset shards, indexed
columnar.py       rows of Parquet and Arrow files
paths.py          which files of this machine are meant
per_process.py    what each process opens for itself
hedging.py        late reads are asked for once more
datasets.py       what users bring: data sets, lists, arrays, iterables
"""
