"""Where samples come from.

source.py         Source: what penstock reads itself, and what each process opens for
                  that; the user's datasets
folder.py         class folders of this machine, and what its paths and patterns name
files.py          files anywhere, through fsspec; class folders in a store
lmdb_records.py   values of an LMDB database
tar_shards.py     WebDataset shards, indexed
remote_shards.py  WebDataset shards of a store
columnar.py       rows of Parquet and Arrow files
patience.py       limits of remote reads: retries, second requests, size, bandwidth
"""
