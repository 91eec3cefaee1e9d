"""What does the demo train, and how is it stopped in the middle of a save?

A small transformer with all that makes a training run hard to repeat: dropout, moments of AdamW, a learning rate
schedule, a gradient scaler, batches drawn from a generator. ``train`` runs in a process of its own. If that is to be
killed, its store lets one part of one save reach the disk, says so, and lets nothing more pass: the kill that follows
hits an unfinished save, however fast the disk is.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import threading
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from ckptstore.cli._demo_process import Finished, Saving, Started, Trained
from ckptstore.manager import CheckpointManager
from ckptstore.opening import open_store
from ckptstore.state.tensors import memory
from ckptstore.testing.recording import RecordingStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptstore.cli._demo_process import Job, Message
    from ckptstore.store import CheckpointStore, PartWriter

__all__ = ["train"]

VOCABULARY = 128
WIDTH = 256
LAYERS = 3
HEADS = 8
BATCH = (4, 32)
DATA_SEED = 1234


class Transformer(nn.Module):
    """The architecture of the reference workload, small."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(self.embedding(tokens))
        return self.head(hidden)  # type: ignore[no-any-return]


def train(job: Job, tell: Callable[[Message], None]) -> None:
    """Train to the last step, resuming from what is at ``job.url``; tell about each loss."""
    torch.set_num_threads(1)  # two runs share the machine; sums are taken in the same order in all of them
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=job.steps)
    scaler = torch.amp.GradScaler("cpu")
    data = torch.Generator().manual_seed(DATA_SEED)
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "scaler": scaler,
        "data": data,
        "config": {"width": WIDTH, "layers": LAYERS, "batch": BATCH},
    }

    store = open_store(job.url)
    if job.hold_step is not None:
        store = _HoldingStore(store, job.hold_step, tell)
    with store, CheckpointManager(store, every=job.every) as manager:
        resumed = manager.resume(**state)
        n_parameters = sum(parameter.numel() for parameter in model.parameters())
        tell(Started(step=resumed.step, n_parameters=n_parameters))
        for step in range(resumed.step + 1, job.steps + 1):
            inputs, targets = _batch(data)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            tell(Trained(step=step, loss=loss.item()))
            manager.step(step, **state, metrics={"loss": loss})
    tell(Finished(digest=_digest(model, optimizer)))


def _batch(data: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw sequences that count upwards from anywhere by 1 to 4: something to learn, never the same twice."""
    n_sequences, length = BATCH
    start = torch.randint(VOCABULARY, (n_sequences, 1), generator=data)
    stride = torch.randint(1, 5, (n_sequences, 1), generator=data)
    tokens = (start + stride * torch.arange(length + 1)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def _digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return the sha256 of every bit that training ended with: parameters, moments, step counts, learning rate."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(memory(parameter.detach()))
        for key, moment in sorted(optimizer.state[parameter].items()):
            digest.update(key.encode())
            digest.update(memory(moment))
    digest.update(float(optimizer.param_groups[0]["lr"]).hex().encode())
    return digest.hexdigest()


class _HoldingStore(RecordingStore):
    """Lets one part of the payload of one step reach the disk, and then nothing more."""

    def __init__(self, store: CheckpointStore, step: int, tell: Callable[[Message], None]) -> None:
        super().__init__(store)
        self._step = step
        self._tell = tell

    def create(self, key: str, n_bytes: int, part_bytes: int) -> PartWriter:
        writer = super().create(key, n_bytes, part_bytes)
        attempt = key.split("/")[-2]  # begins with the step
        return _HoldingPartWriter(writer, n_bytes, self._tell) if int(attempt.split("-")[0]) == self._step else writer


class _HoldingPartWriter:
    def __init__(self, writer: PartWriter, n_bytes: int, tell: Callable[[Message], None]) -> None:
        self._writer = writer
        self._n_bytes = n_bytes
        self._tell = tell
        self._lock = threading.Lock()

    def write(self, offset: int, buffer: bytes | bytearray | memoryview) -> None:
        self._lock.acquire()  # never released: the writer of any other part waits here
        self._writer.write(offset, buffer)
        self._tell(Saving(written=len(buffer), n_bytes=self._n_bytes))
        self._hold()

    def finish(self) -> None:
        self._hold()

    def abort(self) -> None:
        self._hold()

    def _hold(self) -> NoReturn:
        """Wait for the end: SIGKILL, or, should the demo itself be killed first, that."""
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)
