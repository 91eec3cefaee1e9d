"""Which objects lie below a folder, in the order of their keys?

A folder is read whole and sorted, as "name/" if it is a folder itself: so all that is inside comes after "name-x" and
"name.x", as it does in the order of keys. Links and special files are no objects, nor are names that no key can have.
What vanishes during the walk is skipped.
"""

from __future__ import annotations

import stat
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptstore.errors import ConfigError
from ckptstore.store import ObjectInfo, check_key
from ckptstore_posix.folders import FOLDER
from ckptstore_posix.placing import TEMPORARY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptstore_posix.files import Files
    from ckptstore_posix.folders import Folders

__all__ = ["Walk", "refusal"]


def refusal(key: str) -> ConfigError | None:
    """Return what is wrong with *key*, or None."""
    try:
        check_key(key)
    except ConfigError as error:
        return error
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """One walk, for keys that start with *prefix* and are greater than *after*: objects, or temporaries instead."""

    files: Files
    folders: Folders
    prefix: str
    after: str = ""
    temporaries: bool = False

    def __iter__(self) -> Iterator[ObjectInfo]:
        base, slash, _ = self.prefix.rpartition("/")
        # Absent, or a file: nothing is below it.
        with suppress(FileNotFoundError, NotADirectoryError), self.folders.reading(base, FOLDER) as folder:
            yield from self._inside(folder, base + slash)

    def _inside(self, folder: int, at: str) -> Iterator[ObjectInfo]:
        try:
            entries = self.files.scandir(folder)
        except FileNotFoundError:
            return
        for name, is_folder in sorted(entries, key=lambda entry: entry[0] + "/" * entry[1]):
            key = at + name
            if is_folder:
                if self._may_hold(key):
                    yield from self._enter(folder, name, key)
            elif self._is_wanted(name, key):
                with suppress(FileNotFoundError):
                    found = self.files.lstat(name, folder=folder)
                    if stat.S_ISREG(found.st_mode):
                        yield ObjectInfo(key=key, n_bytes=found.st_size, modified=found.st_mtime)

    def _enter(self, folder: int, name: str, key: str) -> Iterator[ObjectInfo]:
        try:
            inner = self.folders.enter(folder, name, FOLDER)
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            yield from self._inside(inner, f"{key}/")
        finally:
            with suppress(OSError):
                self.files.close(inner)

    def _may_hold(self, folder_key: str) -> bool:
        inside = f"{folder_key}/"
        on_the_way = inside.startswith(self.prefix) or self.prefix.startswith(inside)
        not_all_before = inside > self.after or self.after.startswith(inside)
        return on_the_way and not_all_before and refusal(folder_key) is None

    def _is_wanted(self, name: str, key: str) -> bool:
        if not key.startswith(self.prefix) or key <= self.after:
            return False
        return name.startswith(TEMPORARY) if self.temporaries else refusal(key) is None
