"""How is the state copied out of training's way as fast as memory allows?

The copy is made straight into the parts of the files to be written: page-aligned memory that was faulted in once and
is kept between saves, since fresh pages cost more than the copy itself. Copies are cut by bytes, not by tensor, so that
two threads finish together and thousands of small tensors cost a few calls. As soon as a part is complete it is handed
on, so writing starts long before staging ends. With less memory than parts, a part waits for the memory of an earlier
one.
"""

from __future__ import annotations

import mmap
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ckptstore.state.container import plan_containers
from ckptstore.state.digest import PART_BYTES
from ckptstore.state.tensors import DTYPES, spec_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckptstore.state.container import ContainerPlan

__all__ = ["COPY_THREADS", "Image", "Part", "SavePlan", "signature_of"]

COPY_THREADS = 2
MIN_SLOTS = 4
_PAGE = 4096


@dataclass(slots=True)
class _Copy:
    """A run of elements of one tensor that goes into one part; ``whole`` if it is all of the tensor."""

    name: str
    whole: bool
    low: int
    high: int
    start: int  # in the part, bytes
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(slots=True)
class Part:
    """One part of one container: its place in the file, and the copies that make its bytes."""

    container: int
    index: int
    offset: int
    n_bytes: int
    copies: list[_Copy] = field(default_factory=list)


class SavePlan:
    """Where every tensor of a state goes. Kept between saves as long as names, dtypes and shapes stay the same."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.signature = signature_of(tensors)
        self.containers: tuple[ContainerPlan, ...] = plan_containers(
            [spec_of(name, tensor) for name, tensor in tensors.items()]
        )
        self.n_tensors = len(tensors)
        self.parts: list[Part] = []
        for number, container in enumerate(self.containers):
            self._cut(number, container)
        self.n_bytes = sum(container.n_bytes for container in self.containers)
        self.slot_bytes = -(-max((part.n_bytes for part in self.parts), default=1) // _PAGE) * _PAGE
        self.staging_bytes = len(self.parts) * self.slot_bytes
        self.sliced = {copy.name for part in self.parts for copy in part.copies if not copy.whole}

    def _cut(self, number: int, container: ContainerPlan) -> None:
        first = len(self.parts)
        for index, offset in enumerate(range(0, container.n_bytes, PART_BYTES)):
            self.parts.append(Part(number, index, offset, min(PART_BYTES, container.n_bytes - offset)))
        for entry in container.entries:
            dtype = DTYPES[entry.spec.dtype]
            low, end = entry.start, entry.start + entry.n_bytes
            while low < end:
                part = self.parts[first + low // PART_BYTES]
                high = min(end, part.offset + PART_BYTES)
                elements = ((low - entry.start) // dtype.itemsize, (high - entry.start) // dtype.itemsize)
                whole = high - low == entry.n_bytes
                shape = entry.spec.shape if whole else (elements[1] - elements[0],)
                part.copies.append(_Copy(entry.spec.name, whole, *elements, low - part.offset, dtype, shape))
                low = high


def signature_of(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.dtype, torch.Size]]:
    """Return what a plan depends on."""
    return [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]


class Image:
    """Staging memory for one save at a time of one plan: a slot for each part, or fewer, used in turn.

    Args:
        plan: Of the states to be staged.
        memory_bytes: At most so much memory, but at least four parts. None: a slot for each part.
    """

    def __init__(self, plan: SavePlan, memory_bytes: int | None) -> None:
        self.plan = plan
        self._slot_bytes = plan.slot_bytes
        n_slots = len(plan.parts)
        if memory_bytes is not None:
            n_slots = min(n_slots, max(MIN_SLOTS, memory_bytes // plan.slot_bytes))
        self.n_slots = max(1, n_slots)
        self.n_bytes = self.n_slots * plan.slot_bytes
        # Pages are faulted in now (populate): in the first save that costs what every later one is spared.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
        self._mapped = mmap.mmap(-1, self.n_bytes, flags=flags)
        self._memory = memoryview(self._mapped)
        self._bytes = torch.frombuffer(self._mapped, dtype=torch.uint8)
        self._views: dict[int, list[torch.Tensor]] = {}
        # Taken as the bare lock: an interrupt may come within a Condition's own enter and exit, and leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._staged_in: list[int] = [-1] * self.n_slots  # the part that a slot holds, not yet released
        self._stopped: BaseException | None = None

    def memory(self, number: int) -> memoryview:
        """Return the bytes of part *number*; valid from when it is handed on until it is released."""
        start = (number % self.n_slots) * self._slot_bytes
        return self._memory[start : start + self.plan.parts[number].n_bytes]

    def begin(self) -> None:
        """Make ready for a new save."""
        with self._lock:
            self._staged_in = [-1] * self.n_slots
            self._stopped = None

    @property
    def holds_all(self) -> bool:
        """Whether every part has memory of its own, so that parts may be filled in any order."""
        return self.n_slots >= len(self.plan.parts)

    def stop(self, error: BaseException) -> None:
        """End a staging that waits for memory: the save has failed."""
        with self._lock:
            self._stopped = error
            self._changed.notify_all()

    def release(self, number: int) -> None:
        """Give the memory of a part back: its bytes are written."""
        with self._lock:
            self._staged_in[number % self.n_slots] = -1
            self._changed.notify_all()

    def copy_now(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy some of the tensors and hand nothing on; needs a slot for each part."""
        flat = self._flat(tensors)
        with torch.no_grad():
            for number in range(len(self.plan.parts)):
                self._fill(number, tensors, flat)

    def stage(self, tensors: Mapping[str, torch.Tensor], on_part: Callable[[int], None], *, threads: int) -> None:
        """Copy *tensors* into the parts; call *on_part* from a copying thread for each part that is complete.

        Returns when everything is copied, so that the caller may change the tensors.
        """
        flat = self._flat(tensors)
        numbers = iter(range(len(self.plan.parts)))
        lock = threading.Lock()
        errors: list[BaseException] = []

        def work() -> None:
            try:
                with torch.no_grad():
                    while not errors:
                        with lock:
                            number = next(numbers, None)
                        if number is None:
                            return
                        self._take_slot(number)
                        self._fill(number, tensors, flat)
                        on_part(number)
            except BaseException as error:  # noqa: BLE001 - raised by the thread that called stage
                errors.append(error)
                self.stop(error)  # another thread may wait for the memory of the part that this one leaves undone

        others = [
            threading.Thread(target=work, name="ckptstore-stage", daemon=True)
            for _ in range(min(threads, len(self.plan.parts)) - 1)
        ]
        try:
            for other in others:
                other.start()
            work()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)
        for other in others:
            while (
                other.ident is not None and other.is_alive()
            ):  # whatever interrupts: until then it copies into the image
                try:
                    other.join()
                except BaseException as error:  # noqa: BLE001 - raised below
                    errors.append(error)
        if errors:
            raise errors[0]

    def _flat(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a flat view of each tensor that is copied in slices; one that is not contiguous is copied, rarely."""
        return {name: tensors[name].detach().contiguous().view(-1) for name in self.plan.sliced if name in tensors}

    def _take_slot(self, number: int) -> None:
        slot = number % self.n_slots
        with self._lock:
            while self._staged_in[slot] != -1 and self._stopped is None:
                self._changed.wait()
            if self._stopped is not None:
                raise self._stopped
            self._staged_in[slot] = number

    def _fill(self, number: int, tensors: Mapping[str, torch.Tensor], flat: Mapping[str, torch.Tensor]) -> None:
        part = self.plan.parts[number]
        views = self._views.get(number)
        if views is None:
            views = self._views[number] = [self._view(number, copy) for copy in part.copies]
        container = self.plan.containers[part.container]
        if part.offset < len(container.header):
            header = container.header[part.offset : part.offset + part.n_bytes]
            self.memory(number)[: len(header)] = header
        copies = part.copies
        if len(tensors) < self.plan.n_tensors:
            views = [view for view, copy in zip(views, copies, strict=True) if copy.name in tensors]
            copies = [copy for copy in copies if copy.name in tensors]
        sources = [tensors[copy.name] if copy.whole else flat[copy.name][copy.low : copy.high] for copy in copies]
        if sources:
            torch._foreach_copy_(views, sources)  # one call for thousands of copies, without the GIL

    def _view(self, number: int, copy: _Copy) -> torch.Tensor:
        start = (number % self.n_slots) * self._slot_bytes + copy.start
        n_bytes = copy.dtype.itemsize
        for size in copy.shape:
            n_bytes *= size
        return self._bytes[start : start + n_bytes].view(copy.dtype).view(copy.shape)
