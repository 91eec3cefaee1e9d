"""The states that the benchmarks save: the reference transformer with AdamW, and synthetic ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Reference", "reference", "synthetic"]


@dataclass(slots=True)
class Reference:
    """The reference workload: about 51.7 million parameters, 620 MB with AdamW's state."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler

    def states(self) -> dict[str, Any]:
        """Return what is saved, by name."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "data_seed": 17,
            "config": {"d_model": 512, "layers": 6, "heads": 8},
        }

    def step(self, batch: torch.Tensor) -> float:
        """Train one step on token ids of shape (2, 64) and return the loss."""
        self.optimizer.zero_grad()
        logits = self.model(batch)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        return float(loss.detach())


def reference(*, seed: int = 0, width: int = 512, layers: int = 6, vocabulary: int = 32000) -> Reference:
    """Build the reference workload, trained for one step so that the optimizer has state."""
    torch.manual_seed(seed)
    layer = torch.nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.1, batch_first=True)
    model = torch.nn.Sequential(
        torch.nn.Embedding(vocabulary, width),
        torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False),
        torch.nn.Linear(width, vocabulary),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10000)
    found = Reference(model, optimizer, scheduler, torch.amp.GradScaler("cpu"))
    found.step(torch.randint(0, vocabulary, (2, 64)))
    return found


def synthetic(sizes: list[int], *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return float32 tensors of these many bytes each, filled once from one random block."""
    generator = torch.Generator().manual_seed(seed)
    block = torch.randn(1 << 20, generator=generator)
    found = {}
    for number, n_bytes in enumerate(sizes):
        tensor = torch.empty(n_bytes // 4)
        for start in range(0, tensor.numel(), block.numel()):
            tensor[start : start + block.numel()] = block[: tensor.numel() - start] + number
        found[f"tensor_{number:05d}"] = tensor
    return found
