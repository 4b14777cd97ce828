"""Values of an LMDB database, in the order of their keys."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from ...cache.disk import calling, databases, opening
from ...errors import SpecError, check
from .source import Source, prints_of_rows


class Database:
    """An open database: LMDB allows one per process."""

    def __init__(self, path: str) -> None:
        import lmdb

        with calling(path):
            self.environment = lmdb.open(
                path,
                subdir=os.path.isdir(path),
                readonly=True,
                lock=False,
                readahead=False,
            )
        # The process that opened it. A forked child closes it, and opens its own.
        self.process = os.getpid()
        self.close = self.environment.close


def database(path: str) -> Database:
    """Return this process's open database at a path."""
    with opening():
        open_database = databases.get(path)
        if open_database is None:
            open_database = databases[path] = Database(path)
        return cast("Database", open_database)


class Lmdb(Source):
    """Sample i is the value of key i, `bytes`; keys are in the database's order."""

    KIND = "Lmdb"
    MAPPED: ClassVar[bool] = True

    def __init__(self, path: str, keys: Sequence[bytes]) -> None:
        self.path, self.keys = path, keys
        self._database: Database | None = None

    @classmethod
    def find(
        cls, path: str | os.PathLike[str], keys: Sequence[bytes] | None = None
    ) -> Lmdb:
        """Return the records of a database; list its keys now unless given.

        Raises:
            SpecError: there is no database, or it has no record.
        """
        import lmdb

        where = os.path.abspath(os.fspath(path))
        try:
            open_database = database(where)
        except lmdb.Error as error:
            raise SpecError(
                f"`from_lmdb` cannot open {os.fspath(path)!r}: {error}; give the folder"
                " that holds data.mdb, or the file, and close what else has it open in"
                " this process"
            ) from error
        if keys is None:
            with calling(where), open_database.environment.begin() as transaction:
                keys = [*transaction.cursor().iternext(keys=True, values=False)]
        check(
            keys,
            f"`from_lmdb` found no record in {os.fspath(path)!r}: it has no key"
            "; give a database that has records",
        )
        return cls(where, tuple(keys))

    @property
    def shown(self) -> tuple[object, ...]:
        return (self.path,)

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: Any) -> bytes:
        return self.__getitems__((index,))[0]

    def __getitems__(self, indices: Sequence[int]) -> list[bytes]:
        """Return the values of some keys from one consistent snapshot.

        Raises:
            KeyError: a key is missing.
        """
        keys = [self.keys[index] for index in indices]
        with calling(self.path), self._opened().environment.begin() as transaction:
            values: list[Any] = [*map(transaction.get, keys)]
        if None in values:
            raise KeyError(keys[values.index(None)])
        return values

    def sample_fingerprints(self) -> NDArray[np.uint64]:
        """Return a fingerprint of each record: `uint64 [n, 2]`.

        All change when the file does: its path, size and time stand for its content.
        """
        from ...cache.fingerprint import file_fingerprints

        is_folder = os.path.isdir(self.path)
        file = os.path.join(self.path, "data.mdb") if is_folder else self.path
        return prints_of_rows(
            file_fingerprints([file]), np.array([len(self)]), self.identity()
        )

    def identity(self) -> str:
        """Return the hash of the keys."""
        hasher = hashlib.blake2b(digest_size=16)
        for key in self.keys:
            hasher.update(len(key).to_bytes(4, "little") + key)
        return hasher.hexdigest()

    def _opened(self) -> Database:
        open_database = self._database
        if open_database is None or open_database.process != os.getpid():
            open_database = self._database = database(self.path)
        return open_database

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.keys)

    def __repr__(self) -> str:
        return f"<Lmdb {self.path!r}: {len(self)} records>"
