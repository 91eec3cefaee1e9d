"""A small training run with everything in it that a checkpoint has to bring back."""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_numbers = itertools.count()


def new_url() -> str:
    """Return the address of a run in memory that no other test uses."""
    return f"memory://reader-{next(_numbers)}"


class Tied(nn.Module):
    """An embedding that is also the head, a norm with buffers, dropout between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.drop(self.norm(self.embedding(tokens)))
        logits: torch.Tensor = self.head(hidden)
        return logits


class Training:
    """Fresh objects, and a step that draws from the global generator."""

    def __init__(
        self,
        optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer] | None = None,
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        scaler: bool = True,
    ) -> None:
        self.model = Tied().to(dtype)
        self.optimizer = (optimizer or torch.optim.AdamW)(self.model.parameters())
        self.scheduler = (scheduler or (lambda found: torch.optim.lr_scheduler.CosineAnnealingLR(found, T_max=50)))(
            self.optimizer
        )
        self.scaler = torch.amp.GradScaler("cpu", enabled=scaler, init_scale=16.0)

    def states(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
        }

    def step(self) -> float:
        tokens = torch.randint(11, (4,))
        loss = nn.functional.cross_entropy(self.model(tokens).float(), tokens)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(loss.item())
        else:
            self.scheduler.step()
        return loss.item()

    def content(self) -> dict[str, Any]:
        """Return a copy of everything that a checkpoint of it holds."""
        return copy.deepcopy({name: item.state_dict() for name, item in self.states().items()})
