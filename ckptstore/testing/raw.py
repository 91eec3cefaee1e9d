"""What is really stored, whatever the store says?

A raw view reads and writes the same data past the store, as another program would. The kit reads through it what the
store wrote, and plants what the store must cope with. One view per kind of storage, each a few lines, so that it can
be trusted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ckptstore.memory import _spaces

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["RawDirectory", "RawMemory", "RawView"]


class RawView(Protocol):
    """The data under a store's root, past the store. Keys are the store's."""

    def read(self, key: str) -> bytes | None:
        """Return the bytes under *key*, None if there are none."""
        ...

    def write(self, key: str, body: bytes) -> None:
        """Put *body* under *key*, over whatever is there, with no care for durability."""
        ...

    def delete(self, key: str) -> None:
        """Remove *key*; absent is fine."""
        ...

    def keys(self) -> set[str]:
        """Return the name of everything stored, temporaries and foreign names included."""
        ...


class RawDirectory:
    """Files below a directory, as ``open`` sees them."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, key: str) -> bytes | None:
        try:
            return (self._root / key).read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def write(self, key: str, body: bytes) -> None:
        path = self._root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)

    def delete(self, key: str) -> None:
        (self._root / key).unlink(missing_ok=True)

    def keys(self) -> set[str]:
        return {path.relative_to(self._root).as_posix() for path in self._root.rglob("*") if not path.is_dir()}


class RawMemory:
    """The table behind every ``MemoryStore`` of one name; open one of them first."""

    def __init__(self, name: str) -> None:
        self._space = _spaces[name]

    def read(self, key: str) -> bytes | None:
        with self._space.lock:
            return self._space.objects.get(key)

    def write(self, key: str, body: bytes) -> None:
        with self._space.lock:
            self._space.objects[key] = body

    def delete(self, key: str) -> None:
        with self._space.lock:
            self._space.objects.pop(key, None)

    def keys(self) -> set[str]:
        with self._space.lock:
            return set(self._space.objects)
