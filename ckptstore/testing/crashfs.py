"""Which states may a disk be in after the power was cut?

A file system in memory with the system calls that a store on files makes, which forgets at a power cut what was not
synced. It is as bad as POSIX allows, so what survives here survives on any file system whose fsync is honest:

- The bytes of a file are durable up to the last fsync *of that file*. Of what was written since, any of its 4 KiB
  blocks may survive, each by itself, and so may the size: blocks that did not survive are zeros, or what was before.
- A name is durable after an fsync *of its folder*. Of the changes since, any may survive, each by itself. A rename is
  one change: the old name or the new one, never neither and never both.
- After an fsync that failed, the bytes it was to save are never saved by a later one.

Every change is recorded. ``cuts`` replays the record and yields, for a power cut after each change, the disks that may
be found: all of them when they are few, else the two extremes and a sample that the seed fixes. Each is a file system
of its own, on which a fresh store can be opened::

    files = CrashFiles()
    save_something(PosixStore(PosixConfig(root=Path("/run")), files=files))
    for cut in files.cuts():
        check(PosixStore(PosixConfig(root=Path("/run")), files=cut.files), cut.after)

Links and permissions are not modelled.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import random
import stat
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, assert_never

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Change", "CrashFiles", "Cut"]

BLOCK = 4096
"""The unit in which the bytes of a file survive a power cut."""

_ROOT = 0
_FEW_BLOCKS = 3
_SAMPLED_SUBSETS = 6
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True, slots=True)
class _New:
    node: int
    is_folder: bool


@dataclass(frozen=True, slots=True)
class _Write:
    node: int
    offset: int
    body: bytes


@dataclass(frozen=True, slots=True)
class _Resize:
    node: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class _Sync:
    node: int
    failed: bool = False


@dataclass(frozen=True, slots=True)
class _Enter:
    folder: int
    name: str
    node: int


@dataclass(frozen=True, slots=True)
class _Leave:
    folder: int
    name: str


@dataclass(frozen=True, slots=True)
class _Rename:
    folder: int
    name: str
    new_name: str
    node: int


_Naming: TypeAlias = _Enter | _Leave | _Rename
_Effect: TypeAlias = _New | _Write | _Resize | _Sync | _Naming


@dataclass(slots=True)
class _File:
    """Bytes as a running process sees them, and as the disk has them."""

    live: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    dirty: set[int] = field(default_factory=set)
    """Blocks that the next fsync saves."""
    lost: set[int] = field(default_factory=set)
    """Blocks that an fsync failed to save, and that no later one will."""

    def mark(self, start: int, end: int) -> None:
        blocks = range(start // BLOCK, -(-end // BLOCK))
        self.dirty.update(blocks)
        self.lost.difference_update(blocks)

    def resize(self, n_bytes: int) -> None:
        old = len(self.live)
        if n_bytes < old:
            del self.live[n_bytes:]
        else:
            self.live.extend(bytes(n_bytes - old))
        self.mark(min(old, n_bytes), max(old, n_bytes))

    def sync(self, *, failed: bool) -> None:
        if failed:
            self.lost |= self.dirty
        else:
            self.durable = self.mixed(self.dirty, len(self.live))
        self.dirty.clear()

    def mixed(self, saved: set[int], n_bytes: int) -> bytes:
        """Return *n_bytes* in which the blocks *saved* are live, and the others as they were on the disk."""
        mixed = bytearray(self.durable[:n_bytes].ljust(n_bytes, b"\0"))
        for block in saved:
            start, end = block * BLOCK, min((block + 1) * BLOCK, n_bytes, len(self.live))
            if start < end:
                mixed[start:end] = self.live[start:end]
        return bytes(mixed)

    def survivors(self, chance: random.Random) -> list[bytes]:
        """Return what the file may hold after a power cut; the first is the least, the second the most."""
        loose = sorted(self.dirty | self.lost)
        if not loose and len(self.live) == len(self.durable):
            return [self.durable]
        sizes = {len(self.durable), len(self.live)}
        between = [block * BLOCK for block in loose if min(sizes) < block * BLOCK < max(sizes)]
        subsets: list[set[int]]
        if len(loose) <= _FEW_BLOCKS:
            sizes.update(between)
            subsets = [set(some) for n in range(len(loose) + 1) for some in itertools.combinations(loose, n)]
        else:
            sizes.update(chance.sample(between, min(2, len(between))))
            subsets = [set(loose[: chance.randrange(len(loose))]) for _ in range(_SAMPLED_SUBSETS // 2)]
            subsets += [{block for block in loose if chance.random() < 1 / 2} for _ in range(_SAMPLED_SUBSETS // 2)]
            subsets += [set(), set(loose)]
        found = [self.durable, bytes(self.live)]
        found += [self.mixed(subset, n_bytes) for subset in subsets for n_bytes in sorted(sizes)]
        return list(dict.fromkeys(found))


@dataclass(slots=True)
class _Folder:
    """Names as a running process sees them, as the disk has them, and the changes between the two."""

    live: dict[str, int] = field(default_factory=dict)
    durable: dict[str, int] = field(default_factory=dict)
    loose: list[_Naming] = field(default_factory=list)


class _Disk:
    """All nodes. Changes only through ``apply``, so that a record of effects can be replayed."""

    def __init__(self) -> None:
        self.folders: dict[int, _Folder] = {_ROOT: _Folder()}
        self.files: dict[int, _File] = {}

    def apply(self, effect: _Effect) -> None:
        match effect:
            case _New():
                if effect.is_folder:
                    self.folders[effect.node] = _Folder()
                else:
                    self.files[effect.node] = _File()
            case _Write():
                file = self.files[effect.node]
                end = effect.offset + len(effect.body)
                if end > len(file.live):
                    file.resize(end)
                file.live[effect.offset : end] = effect.body
                file.mark(effect.offset, end)
            case _Resize():
                self.files[effect.node].resize(effect.n_bytes)
            case _Sync():
                self._sync(effect)
            case _Enter() | _Leave() | _Rename():
                folder = self.folders[effect.folder]
                _rename(folder.live, effect)
                folder.loose.append(effect)
            case _:  # pragma: no cover
                assert_never(effect)

    def _sync(self, effect: _Sync) -> None:
        folder = self.folders.get(effect.node)
        if folder is None:
            self.files[effect.node].sync(failed=effect.failed)
        elif not effect.failed:
            folder.durable = dict(folder.live)
            folder.loose.clear()

    def links(self, node: int) -> int:
        """Return how many names a file has."""
        return sum(found == node for folder in self.folders.values() for found in folder.live.values())

    def survivors(self, limit: int, chance: random.Random) -> Iterator[_Disk]:
        """Yield the disks that a power cut now may leave."""
        folders = [number for number, folder in self.folders.items() if folder.loose]
        changes = [(number, change) for number in folders for change in self.folders[number].loose]
        named = {node for folder in self.folders.values() for node in folder.durable.values()}
        named |= {change.node for _, change in changes if not isinstance(change, _Leave)}
        contents = {number: file.survivors(chance) for number, file in self.files.items() if number in named}
        loose = [number for number, bodies in contents.items() if len(bodies) > 1]
        widths = [2] * len(changes) + [len(contents[number]) for number in loose]
        for choice in _choices(widths, limit, chance):
            survived = [change for (_, change), took in zip(changes, choice, strict=False) if took]
            picked = dict(zip(loose, choice[len(changes) :], strict=True))
            disk = _Disk()
            disk.files = {number: _settled(bodies[picked.get(number, 0)]) for number, bodies in contents.items()}
            for number, folder in self.folders.items():
                names = dict(folder.durable)
                for change in survived:
                    if change.folder == number:
                        _rename(names, change)
                disk.folders[number] = _Folder(live=names, durable=dict(names))
            yield disk

    def copy(self) -> _Disk:
        """Return a settled disk with the same content."""
        disk = _Disk()
        disk.files = {number: _settled(bytes(file.live)) for number, file in self.files.items()}
        disk.folders = {
            number: _Folder(live=dict(folder.live), durable=dict(folder.live))
            for number, folder in self.folders.items()
        }
        return disk


def _settled(body: bytes) -> _File:
    return _File(live=bytearray(body), durable=body)


def _rename(names: dict[str, int], change: _Naming) -> None:
    if isinstance(change, _Enter):
        names[change.name] = change.node
        return
    names.pop(change.name, None)
    if isinstance(change, _Rename):
        names[change.new_name] = change.node


def _choices(widths: Sequence[int], limit: int, chance: random.Random) -> Iterator[tuple[int, ...]]:
    """Yield one option for each of *widths*: every combination if there are at most *limit*, else a sample.

    In a sample come first: nothing survives, everything does, and everything but one or nothing but one.
    """
    if math.prod(widths) <= limit:
        yield from itertools.product(*(range(width) for width in widths))
        return
    least, most = (0,) * len(widths), (1,) * len(widths)
    seen = dict.fromkeys([least, most])
    for base, other in ((most, 0), (least, 1)):
        for position in chance.sample(range(len(widths)), len(widths)):
            if len(seen) < limit * 3 // 4:
                seen[*base[:position], other, *base[position + 1 :]] = None
    while len(seen) < limit:
        seen[tuple(chance.randrange(width) for width in widths)] = None
    yield from seen


@dataclass(frozen=True, slots=True)
class Change:
    """One system call that changed something: its name, and what it was about."""

    call: str
    about: str


@dataclass(frozen=True, slots=True)
class Cut:
    """One disk that may be found after a power cut.

    Attributes:
        after: How many changes had been made when the power was cut.
        last: The last of them; None before the first.
        files: The disk, with a record of its own.
    """

    after: int
    last: Change | None
    files: CrashFiles


@dataclass(slots=True)
class _Fault:
    call: str | None
    about: str | None
    left: int
    number: int
    after: bool
    lasting: bool


@dataclass(frozen=True, slots=True)
class _Opened:
    node: int
    path: str
    flags: int


class CrashFiles:
    """A disk of its own, with "/" on it. Implements the system calls of ``ckptstore_posix.files.Files``. Thread-safe.

    Args:
        seed: Fixes the sample where there are too many states, so that a failure can be repeated.
        direct: Whether O_DIRECT works; if not, opening with it is EINVAL.
        exclusive: Whether a rename without replacing works; if not, it is EINVAL.
        links: Whether a second link works; if not, it is EPERM.
        write_bytes: The most that one write takes, bytes; None: all of it.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        direct: bool = True,
        exclusive: bool = True,
        links: bool = True,
        write_bytes: int | None = None,
    ) -> None:
        self._seed = seed
        self._direct = direct
        self._exclusive = exclusive
        self._links = links
        self._write_bytes = write_bytes
        self._lock = threading.RLock()
        self._start = self._disk = _Disk()
        self._record: list[tuple[Change, tuple[_Effect, ...]]] = []
        self._calls: list[Change] = []
        self._faults: list[_Fault] = []
        self._opened: dict[int, _Opened] = {}
        self._numbers = itertools.count(1)
        self._generation = 0

    # What a test looks at.

    @property
    def changes(self) -> list[Change]:
        """The calls that changed something so far, a copy; their number says when something was told."""
        with self._lock:
            return [change for change, _ in self._record]

    @property
    def calls(self) -> list[Change]:
        """All calls so far, a copy, those that only looked or failed too."""
        with self._lock:
            return list(self._calls)

    @property
    def open_paths(self) -> list[str]:
        """What is open now: after a verb has returned, nothing may be."""
        with self._lock:
            return [opened.path for opened in self._opened.values()]

    def tree(self) -> dict[str, bytes]:
        """Return every file by its path, as a running process sees it."""
        with self._lock:
            return dict(self._files_below(_ROOT, ""))

    def fail(
        self,
        call: str | None,
        number: int,
        *,
        about: str | None = None,
        nth: int = 1,
        after: bool = False,
        lasting: bool = False,
    ) -> None:
        """Let a later call fail.

        Args:
            call: The name of the method; None counts all calls.
            number: The errno.
            about: The path or name as the call gave it; a descriptor has that it was opened with. None: any.
            nth: Which one, counted from now, from 1.
            after: Whether it has its effect first: the answer is lost, not the call.
            lasting: Whether all that follow fail too.
        """
        with self._lock:
            self._faults.append(_Fault(call=call, about=about, left=nth, number=number, after=after, lasting=lasting))

    def heal(self) -> None:
        """Forget the faults that are planned."""
        with self._lock:
            self._faults.clear()

    def cuts(self, limit: int = 64) -> Iterator[Cut]:
        """Yield the disks that may be found if the power is cut, before the first change and after each.

        Args:
            limit: How many for each cut. Where there are more, extremes and a sample.
        """
        with self._lock:
            record = list(self._record)
            disk = self._start.copy()
        chance = random.Random(self._seed)  # noqa: S311 - a sample of states, to be repeated
        yield Cut(after=0, last=None, files=self._found(disk))
        for after, (change, effects) in enumerate(record, 1):
            for effect in effects:
                disk.apply(effect)
            for survivor in disk.survivors(limit, chance):
                yield Cut(after=after, last=change, files=self._found(survivor))

    def _found(self, disk: _Disk) -> CrashFiles:
        found = CrashFiles(
            seed=self._seed,
            direct=self._direct,
            exclusive=self._exclusive,
            links=self._links,
            write_bytes=self._write_bytes,
        )
        found._start = found._disk = disk
        found._numbers = itertools.count(max([*disk.files, *disk.folders]) + 1)
        found._generation = self._generation + 1  # a process after the cut takes other tokens
        return found

    # The system calls.

    def token(self) -> str:
        with self._lock:
            return f"{self._generation:04d}{next(self._numbers):08d}"

    def open(self, path: str, flags: int, *, folder: int | None = None) -> int:
        with self._calling("open", path):
            above, name = self._locate(path, folder)
            node = above if name in ("", ".") else self._disk.folders[above].live.get(name)
            if flags & os.O_CREAT:
                node = self._new_file(above, name, node, path)
            if node is None:
                raise _error(errno.ENOENT, path)
            if flags & os.O_DIRECTORY and node not in self._disk.folders:
                raise _error(errno.ENOTDIR, path)
            if flags & (os.O_WRONLY | os.O_RDWR) and node in self._disk.folders:
                raise _error(errno.EISDIR, path)
            if flags & _O_DIRECT and not self._direct:
                raise _error(errno.EINVAL, path)
            fd = next(self._numbers)
            self._opened[fd] = _Opened(node=node, path=path, flags=flags)
            return fd

    def close(self, fd: int) -> None:
        with self._lock:
            opened = self._opened.pop(fd, None)  # gone even if the call fails
            with self._calling("close", opened.path if opened else ""):
                if opened is None:
                    raise _error(errno.EBADF, "")

    def fstat(self, fd: int) -> os.stat_result:
        with self._calling("fstat", self._path(fd)):
            return self._status(self._node(fd))

    def lstat(self, path: str, *, folder: int | None = None) -> os.stat_result:
        with self._calling("lstat", path):
            return self._status(self._find(path, folder))

    def preadv(self, fd: int, buffer: memoryview, offset: int) -> int:
        with self._calling("preadv", self._path(fd)):
            body = self._file(fd).live[offset : offset + len(buffer)]
            buffer[: len(body)] = body
            return len(body)

    def map(self, fd: int, n_bytes: int) -> memoryview:
        with self._calling("map", self._path(fd)):
            return memoryview(bytearray(self._file(fd).live[:n_bytes]))

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        with self._calling("pwrite", self._path(fd)) as change:
            self._file(fd)
            if self._opened[fd].flags & _O_DIRECT and (offset % BLOCK or len(buffer) % BLOCK):
                raise _error(errno.EINVAL, self._path(fd))
            body = bytes(buffer[: self._write_bytes])
            self._do(change, _Write(self._node(fd), offset, body))
            return len(body)

    def allocate(self, fd: int, n_bytes: int) -> None:
        with self._calling("allocate", self._path(fd)) as change:
            self._do(change, _Resize(self._node(fd), max(n_bytes, len(self._file(fd).live))))

    def ftruncate(self, fd: int, n_bytes: int) -> None:
        with self._calling("ftruncate", self._path(fd)) as change:
            self._file(fd)
            self._do(change, _Resize(self._node(fd), n_bytes))

    def start_writeback(self, fd: int, offset: int, n_bytes: int) -> None:
        """Change nothing: what begins to be written may as well not arrive."""

    def fsync(self, fd: int) -> None:
        node = self._node(fd)
        lose = _Sync(node, failed=True)
        with self._calling("fsync", self._path(fd), when_failed=lose) as change:
            self._do(change, _Sync(node))

    def mkdir(self, path: str, *, folder: int | None = None) -> None:
        with self._calling("mkdir", path) as change:
            above, name = self._locate(path, folder)
            if not name or name in self._disk.folders[above].live:
                raise _error(errno.EEXIST, path)
            self._refuse_removed(above, path)
            node = next(self._numbers)
            self._do(change, _New(node, is_folder=True), _Enter(above, name, node))

    def rmdir(self, name: str, *, folder: int) -> None:
        with self._calling("rmdir", name) as change:
            node = self._find(name, folder)
            if node not in self._disk.folders:
                raise _error(errno.ENOTDIR, name)
            if self._disk.folders[node].live:
                raise _error(errno.ENOTEMPTY, name)
            self._do(change, _Leave(self._node(folder), name))

    def unlink(self, name: str, *, folder: int) -> None:
        with self._calling("unlink", name) as change:
            if self._find(name, folder) in self._disk.folders:
                raise _error(errno.EISDIR, name)
            self._do(change, _Leave(self._node(folder), name))

    def link(self, name: str, new_name: str, *, folder: int) -> None:
        with self._calling("link", new_name) as change:
            node = self._find(name, folder)
            self._refuse_taken(new_name, folder)
            if not self._links:
                raise _error(errno.EPERM, new_name)
            self._do(change, _Enter(self._node(folder), new_name, node))

    def rename_noreplace(self, name: str, new_name: str, *, folder: int) -> None:
        with self._calling("rename_noreplace", new_name) as change:
            node = self._find(name, folder)
            self._refuse_taken(new_name, folder)
            if not self._exclusive:
                raise _error(errno.EINVAL, new_name)
            self._do(change, _Rename(self._node(folder), name, new_name, node))

    def replace(self, name: str, new_name: str, *, folder: int) -> None:
        with self._calling("replace", new_name) as change:
            node = self._find(name, folder)
            if self._disk.folders[self._node(folder)].live.get(new_name) in self._disk.folders:
                raise _error(errno.EISDIR, new_name)
            self._do(change, _Rename(self._node(folder), name, new_name, node))

    def scandir(self, folder: int) -> list[tuple[str, bool]]:
        with self._calling("scandir", self._path(folder)):
            names = self._disk.folders[self._node(folder)].live
            return [(name, node in self._disk.folders) for name, node in names.items()]

    # How they are made.

    @contextmanager
    def _calling(self, call: str, about: str, when_failed: _Effect | None = None) -> Iterator[Change]:
        """Note a call, and let it fail before or after its effect if that is planned."""
        change = Change(call, about)
        with self._lock:
            self._calls.append(change)
            fault = self._due(change)
            if fault and not fault.after:
                if when_failed is not None:
                    self._do(change, when_failed)
                raise _error(fault.number, about)
            yield change
            if fault:
                raise _error(fault.number, about)

    def _due(self, change: Change) -> _Fault | None:
        due = None
        for fault in list(self._faults):
            if fault.call not in (None, change.call) or fault.about not in (None, change.about):
                continue
            fault.left -= 1
            if fault.left == 0 and not fault.lasting:
                self._faults.remove(fault)
            if fault.left == 0 or (fault.lasting and fault.left < 0):
                due = due or fault
        return due

    def _do(self, change: Change, *effects: _Effect) -> None:
        if self._disk is self._start:
            self._disk = self._start.copy()
        for effect in effects:
            self._disk.apply(effect)
        self._record.append((change, effects))

    def _new_file(self, above: int, name: str, node: int | None, path: str) -> int:
        if node is not None:
            raise _error(errno.EEXIST, path)
        self._refuse_removed(above, path)
        node = next(self._numbers)
        self._do(Change("create", path), _New(node, is_folder=False), _Enter(above, name, node))
        return node

    def _locate(self, path: str, folder: int | None) -> tuple[int, str]:
        """Return the folder that *path* names something in, and the last name."""
        above = _ROOT if folder is None else self._node(folder)
        *way, name = path.strip("/").split("/")
        for step in way:
            node = self._disk.folders[above].live.get(step)
            if node is None:
                raise _error(errno.ENOENT, path)
            if node not in self._disk.folders:
                raise _error(errno.ENOTDIR, path)
            above = node
        return above, name

    def _find(self, path: str, folder: int | None) -> int:
        above, name = self._locate(path, folder)
        node = self._disk.folders[above].live.get(name) if name else above
        if node is None:
            raise _error(errno.ENOENT, path)
        return node

    def _refuse_removed(self, folder: int, path: str) -> None:
        """Nothing can be made in a folder that was removed while it was open."""
        if folder != _ROOT and not self._disk.links(folder):
            raise _error(errno.ENOENT, path)

    def _refuse_taken(self, name: str, folder: int) -> None:
        if name in self._disk.folders[self._node(folder)].live:
            raise _error(errno.EEXIST, name)

    def _node(self, fd: int) -> int:
        try:
            return self._opened[fd].node
        except KeyError:
            raise _error(errno.EBADF, str(fd)) from None

    def _path(self, fd: int) -> str:
        opened = self._opened.get(fd)
        return opened.path if opened else ""

    def _file(self, fd: int) -> _File:
        file = self._disk.files.get(self._node(fd))
        if file is None:
            raise _error(errno.EISDIR, self._path(fd))
        return file

    def _status(self, node: int) -> os.stat_result:
        file = self._disk.files.get(node)
        mode = stat.S_IFDIR | 0o755 if file is None else stat.S_IFREG | 0o644
        n_bytes = 0 if file is None else len(file.live)
        return os.stat_result((mode, node, 0, self._disk.links(node), 0, 0, n_bytes, 0, 0, 0))

    def _files_below(self, folder: int, at: str) -> Iterator[tuple[str, bytes]]:
        for name, node in sorted(self._disk.folders[folder].live.items()):
            if node in self._disk.folders:
                yield from self._files_below(node, f"{at}/{name}")
            else:
                yield f"{at}/{name}", bytes(self._disk.files[node].live)


def _error(number: int, about: str) -> OSError:
    return OSError(number, os.strerror(number), about)
