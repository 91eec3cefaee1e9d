"""How does a training script come to survive being killed?

A transformer of 51.7 million parameters (small ones with --small), trained on batches made from a seed. Run it, stop it
however you like (Ctrl-C, kill -9, a reboot), run it again with the same command: it goes on from its newest checkpoint,
and its losses are those of a run that was never stopped, bit for bit. Only the lines marked with "ckptstore" are ours.

    python examples/train_transformer.py --url /tmp/runs/demo --small
    ckptstore ls /tmp/runs/demo
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import ckptstore

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large the model and its batches are."""

    vocabulary: int = 32_000
    width: int = 512
    layers: int = 6
    heads: int = 8
    feed_forward: int = 2048
    batch: tuple[int, int] = (2, 64)


SMALL = Size(vocabulary=512, width=64, layers=2, heads=4, feed_forward=256, batch=(4, 32))


class Transformer(nn.Module):
    """Embedding, encoder layers with dropout, and a linear head."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        layer = nn.TransformerEncoderLayer(size.width, size.heads, size.feed_forward, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)
        self.head = nn.Linear(size.width, size.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits of shape ``(*tokens.shape, vocabulary)``."""
        logits: torch.Tensor = self.head(self.encoder(self.embedding(tokens)))
        return logits


def make_batch(size: Size, seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and targets of *step*; seed and step are all there is to the position in the data."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    tokens = torch.randint(size.vocabulary, (size.batch[0], size.batch[1] + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def train(url: str, *, steps: int, every: int | str, size: Size, seed: int) -> dict[int, float]:
    """Train until *steps* have been made in all runs at *url* together; return the losses of this one by step."""
    torch.manual_seed(seed)
    model = Transformer(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10_000)
    scaler = torch.amp.GradScaler("cpu")
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "scaler": scaler,
        "data_seed": seed,
        "config": vars(size),
    }
    losses: dict[int, float] = {}
    with ckptstore.CheckpointManager(url, every=every) as manager:  # ckptstore
        resumed = manager.resume(**state)  # ckptstore: fills the objects above, and the random generators
        seed = state["data_seed"] = resumed.values["data_seed"]  # ckptstore: as saved; on a fresh run, as passed in
        print(f"starting after step {resumed.step}")
        for step in range(resumed.step + 1, steps + 1):
            tokens, targets = make_batch(size, seed, step)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            losses[step] = loss.item()
            print(f"step {step}  loss {losses[step]:.6f}  {losses[step].hex()}")
            manager.step(step, **state, metrics={"loss": loss})  # ckptstore: saves if a checkpoint is due
    return losses


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", required=True, help="where the run's checkpoints live: a path or a URL")
    parser.add_argument("--steps", type=int, default=100, help="the last step (default: %(default)s)")
    parser.add_argument("--every", default="10 steps", help='when to save: "10 steps", "5 min" (default: %(default)s)')
    parser.add_argument("--seed", type=int, default=1234, help="of parameters, dropout and data (default: %(default)s)")
    parser.add_argument("--small", action="store_true", help="a small model, for a quick look")
    parser.add_argument("--threads", type=int, help="of torch; bit for bit equal losses need the same number")
    chosen = parser.parse_args(arguments)
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    train(chosen.url, steps=chosen.steps, every=chosen.every, size=SMALL if chosen.small else Size(), seed=chosen.seed)


if __name__ == "__main__":
    main()
