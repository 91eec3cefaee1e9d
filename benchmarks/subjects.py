"""Who is measured: ckptstore in its modes, the peers that can be installed, and the physical limits.

A subject saves and loads the same states. ``save`` returns when training could go on, ``settle`` when the bytes are
durable; ``load`` fills the live tensors. Each is used as its documentation advises for speed, with the data durable.
"""

from __future__ import annotations

import io
import mmap
import os
import shutil
import threading
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["SUBJECTS", "Subject"]

BLOCK = 16 << 20


class Subject:
    """One way to save.

    Args:
        states: Live objects and tensors by name.
        folder: Where to save; emptied between saves by ``clean``.
    """

    loads = True

    def __init__(self, states: dict[str, Any], folder: Path) -> None:
        self.states = states
        self.folder = folder
        self.stall_later_s = 0.0  # stall that shows only at the optimizer's next step

    def tensors(self) -> dict[str, Any]:
        """Return the states as nested dicts of live tensors, as the peers take them."""
        return {name: item.state_dict() if hasattr(item, "state_dict") else item for name, item in self.states.items()}

    def flat(self) -> dict[str, torch.Tensor]:
        """Return every live tensor once, by a flat name."""
        found: dict[str, torch.Tensor] = {}

        def walk(value: Any, path: str) -> None:
            if isinstance(value, torch.Tensor):
                found[path] = value
            elif isinstance(value, dict):
                for key, item in value.items():
                    walk(item, f"{path}.{key}")

        walk(self.tensors(), "")
        return found

    def target(self, step: int) -> Path:
        """Return the file or folder of one save."""
        return self.folder / f"step_{step}"

    def save(self, step: int) -> None:
        """Save; return when training could go on."""
        raise NotImplementedError

    def settle(self) -> None:
        """Return when the last save is durable."""

    def load(self, step: int) -> None:
        """Fill the live tensors from a save."""
        raise NotImplementedError

    def clean(self, step: int) -> None:
        """Remove a save."""
        target = self.target(step)
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)

    def close(self) -> None:
        """End what the subject keeps running."""


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class MemoryCopy(Subject):
    """The least a consistent copy can cost: all tensors into one block of memory that is there already, two threads."""

    loads = False

    def __init__(self, states: dict[str, Any], folder: Path) -> None:
        super().__init__(states, folder)
        flat = [tensor for tensor in self.flat().values() if tensor.numel()]
        memory = mmap.mmap(-1, sum(tensor.nbytes for tensor in flat), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory[:] = bytes(len(memory))
        block = torch.frombuffer(memory, dtype=torch.uint8)
        self._halves: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = [([], []), ([], [])]
        start = 0
        for tensor in sorted(flat, key=lambda item: -item.element_size()):
            for low in range(0, tensor.nbytes, BLOCK):
                n_bytes = min(BLOCK, tensor.nbytes - low)
                half = self._halves[0 if start + low < len(memory) // 2 else 1]
                half[0].append(block[start + low : start + low + n_bytes])
                half[1].append(tensor.detach().contiguous().view(-1).view(torch.uint8)[low : low + n_bytes])
            start += tensor.nbytes

    def save(self, step: int) -> None:  # noqa: ARG002 - there is no file
        other = threading.Thread(target=torch._foreach_copy_, args=self._halves[1])
        other.start()
        torch._foreach_copy_(*self._halves[0])
        other.join()


class RawDisk(Subject):
    """The least a durable write can cost: the bytes from aligned memory past the page cache, from two threads."""

    direct = True

    def __init__(self, states: dict[str, Any], folder: Path) -> None:
        super().__init__(states, folder)
        self._n_bytes = sum(tensor.nbytes for tensor in self.flat().values())
        n_mapped = -(-self._n_bytes // 4096) * 4096
        self._memory = mmap.mmap(-1, n_mapped)
        self._memory[:] = os.urandom(4096) * (n_mapped // 4096)

    def save(self, step: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | (os.O_DIRECT if self.direct else 0)
        handle = os.open(self.target(step), flags, 0o666)
        view = memoryview(self._memory)

        def write(first: int) -> None:
            for start in range(first, len(view), 2 * BLOCK):
                os.pwrite(handle, view[start : start + BLOCK], start)

        other = threading.Thread(target=write, args=(BLOCK,))
        other.start()
        write(0)
        other.join()
        os.fsync(handle)
        os.close(handle)

    def load(self, step: int) -> None:
        """Read from several threads: from the page cache, or past it when the file is not there."""
        flags = os.O_RDONLY | (os.O_DIRECT if getattr(self, "cold", False) else 0)
        handle = os.open(self.target(step), flags)
        view = memoryview(self._memory)
        threads = 8 if flags & os.O_DIRECT else 2

        def read(first: int) -> None:
            for start in range(first * BLOCK, len(view), threads * BLOCK):
                os.preadv(handle, [view[start : start + BLOCK]], start)

        others = [threading.Thread(target=read, args=(first,)) for first in range(threads)]
        for other in others:
            other.start()
        for other in others:
            other.join()
        os.close(handle)


class RawDiskBuffered(RawDisk):
    """The same through the page cache."""

    direct = False
    loads = False


# ── ckptstore ────────────────────────────────────────────────────────────────────────────────────────────────────────


class CkptStore(Subject):
    """ckptstore with a staged copy, written in the background."""

    staging: Literal["copy", "overlap"] = "copy"
    wait = False
    verify = "full"

    def __init__(self, states: dict[str, Any], folder: Path) -> None:
        super().__init__(states, folder)
        import ckptstore

        self._manager = ckptstore.CheckpointManager(folder / "run", staging=self.staging, rng=False)
        self._manager.resume(fresh=True)
        self._ckptstore = ckptstore
        self._handle: Any = None

    def save(self, step: int) -> None:
        self._handle = self._manager.save(step, wait=self.wait, **self.states)

    def settle(self) -> None:
        before = self._handle.stall_s
        self._manager.staged()
        self._handle.result()
        self.stall_later_s = self._handle.stall_s - before

    def target(self, step: int) -> Path:  # noqa: ARG002 - one run
        return self.folder / "run"

    def load(self, step: int) -> None:
        self._ckptstore.restore(self.folder / "run", step, verify=self.verify, **self.states)

    def clean(self, step: int) -> None:
        """Free the space of the older saves; the run's journal stays."""
        for folder in sorted((self.folder / "run" / "data").glob("*/*")):
            if not folder.name.startswith(f"{step:012d}"):
                shutil.rmtree(folder)

    def close(self) -> None:
        self._manager.close()


class CkptStoreOverlap(CkptStore):
    """ckptstore, copying during the next forward and backward."""

    staging = "overlap"
    loads = False


class CkptStoreSync(CkptStore):
    """ckptstore, returning when durable; loads with verification while reading."""

    wait = True
    verify = "inline"


# ── peers ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


class TorchSave(Subject):
    """torch.save, then fsync."""

    mmap = False

    def save(self, step: int) -> None:
        torch.save(self.tensors(), self.target(step))
        _sync(self.target(step))

    def load(self, step: int) -> None:
        found = torch.load(self.target(step), weights_only=True, mmap=self.mmap)
        for name, item in self.states.items():
            if hasattr(item, "load_state_dict"):
                item.load_state_dict(found[name])
            elif isinstance(item, dict):
                for key, value in item.items():
                    if isinstance(value, torch.Tensor):
                        value.copy_(found[name][key])


class TorchSaveMmap(TorchSave):
    """torch.save; loads with mmap=True."""

    mmap = True


class _Threaded(TorchSave):
    """Something written by a thread of its own."""

    loads = False

    def _start(self, job: Any) -> None:
        self._thread = threading.Thread(target=job)
        self._thread.start()

    def settle(self) -> None:
        self._thread.join()


class TorchSaveMemoryThread(_Threaded):
    """torch.save into memory, then a writer thread with fsync."""

    def save(self, step: int) -> None:
        buffer = io.BytesIO()
        torch.save(self.tensors(), buffer)

        def write() -> None:
            with self.target(step).open("wb") as file:
                file.write(buffer.getbuffer())
                os.fsync(file.fileno())

        self._start(write)


class CloneTorchSaveThread(_Threaded):
    """A clone of every tensor, then torch.save with fsync in a thread."""

    def save(self, step: int) -> None:
        def clone(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.clone()
            return {key: clone(item) for key, item in value.items()} if isinstance(value, dict) else value

        copied = clone(self.tensors())

        def write() -> None:
            torch.save(copied, self.target(step))
            _sync(self.target(step))

        self._start(write)


class Dcp(Subject):
    """torch.distributed.checkpoint, one writer thread."""

    threads = 1

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        writer = dcp.FileSystemWriter(self.target(step), thread_count=self.threads)
        dcp.save(self._dict(), storage_writer=writer, no_dist=True)

    def load(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        found = self._dict()
        dcp.load(found, storage_reader=dcp.FileSystemReader(self.target(step)), no_dist=True)

    def _dict(self) -> dict[str, Any]:
        return self.tensors()


class DcpFour(Dcp):
    """torch.distributed.checkpoint, four writer threads."""

    threads = 4
    loads = False


class DcpAsyncThread(Dcp):
    """dcp.async_save in a thread."""

    loads = False
    kind = "thread"
    keeps_stager = False

    def __init__(self, states: dict[str, Any], folder: Path) -> None:
        super().__init__(states, folder)
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
        self._stager: Any = None
        if self.keeps_stager:
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=False,
                    use_shared_memory=False,
                    use_async_staging=False,
                    use_non_blocking_copy=False,
                )
            )

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        kind = AsyncCheckpointerType.PROCESS if self.kind == "process" else AsyncCheckpointerType.THREAD
        self._future = dcp.async_save(
            self._dict(),
            storage_writer=dcp.FileSystemWriter(self.target(step), thread_count=4),
            async_checkpointer_type=kind,
            async_stager=self._stager,
        )

    def settle(self) -> None:
        future: Any = getattr(self._future, "upload_completion", self._future)
        future.result()

    def close(self) -> None:
        import torch.distributed as dist

        if self._stager is not None:
            self._stager.close()
        dist.destroy_process_group()


class DcpAsyncKept(DcpAsyncThread):
    """dcp.async_save in a thread, its staging memory kept between saves."""

    keeps_stager = True


class DcpAsyncProcess(DcpAsyncThread):
    """dcp.async_save in a process of its own."""

    kind = "process"


class Safetensors(Subject):
    """safetensors save_file, then fsync."""

    def save(self, step: int) -> None:
        from safetensors.torch import save_file

        save_file({name: tensor.contiguous() for name, tensor in self.flat().items()}, self.target(step))
        _sync(self.target(step))

    def load(self, step: int) -> None:
        from safetensors import safe_open

        with safe_open(self.target(step), "pt") as file, torch.no_grad():
            for name, tensor in self.flat().items():
                tensor.copy_(file.get_tensor(name))


class TorchSnapshot(Subject):
    """torchsnapshot take."""

    asynchronous = False

    def save(self, step: int) -> None:
        from torchsnapshot import Snapshot, StateDict

        state = {"state": StateDict(**{f"t{n}": tensor for n, tensor in enumerate(self.flat().values())})}
        take = Snapshot.async_take if self.asynchronous else Snapshot.take
        self._pending = take(str(self.target(step)), state)

    def settle(self) -> None:
        if self.asynchronous:
            self._pending.wait()
        os.sync()  # it flushes nothing by itself

    def load(self, step: int) -> None:
        from torchsnapshot import Snapshot, StateDict

        state = StateDict(**{f"t{n}": tensor for n, tensor in enumerate(self.flat().values())})
        Snapshot(str(self.target(step))).restore({"state": state})


class TorchSnapshotAsync(TorchSnapshot):
    """torchsnapshot async_take."""

    asynchronous = True
    loads = False


class Orbax(Subject):
    """orbax, waiting for the commit; tensors are handed over as NumPy arrays on the same memory."""

    asynchronous = False

    def __init__(self, states: dict[str, Any], folder: Path) -> None:
        super().__init__(states, folder)
        import orbax.checkpoint as ocp

        self._args = ocp.args
        handler = ocp.StandardCheckpointHandler()
        self._checkpointer = ocp.AsyncCheckpointer(handler)

    def save(self, step: int) -> None:
        arrays = {name: tensor.detach().numpy() for name, tensor in self.flat().items()}
        self._checkpointer.save(self.target(step), args=self._args.StandardSave(arrays))
        if not self.asynchronous:
            self._checkpointer.wait_until_finished()

    def settle(self) -> None:
        self._checkpointer.wait_until_finished()
        os.sync()

    def load(self, step: int) -> None:
        flat = self.flat()
        arrays = {name: tensor.detach().numpy() for name, tensor in flat.items()}
        found = self._checkpointer.restore(self.target(step), args=self._args.StandardRestore(arrays))
        with torch.no_grad():
            for name, tensor in flat.items():
                tensor.copy_(torch.from_numpy(found[name]))

    def close(self) -> None:
        self._checkpointer.close()


class OrbaxAsync(Orbax):
    """orbax in the background."""

    asynchronous = True
    loads = False


SUBJECTS: dict[str, type[Subject]] = {
    "limit: memory copy": MemoryCopy,
    "limit: raw disk": RawDisk,
    "limit: raw disk, buffered": RawDiskBuffered,
    "ckptstore copy": CkptStore,
    "ckptstore overlap": CkptStoreOverlap,
    "ckptstore sync": CkptStoreSync,
    "torch.save": TorchSave,
    "torch.save, load mmap": TorchSaveMmap,
    "torch.save memory + thread": TorchSaveMemoryThread,
    "clone + torch.save thread": CloneTorchSaveThread,
    "dcp.save 1 thread": Dcp,
    "dcp.save 4 threads": DcpFour,
    "dcp.async_save thread": DcpAsyncThread,
    "dcp.async_save kept stager": DcpAsyncKept,
    "dcp.async_save process": DcpAsyncProcess,
    "safetensors": Safetensors,
    "torchsnapshot take": TorchSnapshot,
    "torchsnapshot async_take": TorchSnapshotAsync,
    "orbax sync": Orbax,
    "orbax async": OrbaxAsync,
}
