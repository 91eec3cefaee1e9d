"""Every single inverted bit is found by whatever reads it, and all of them by verification."""

from __future__ import annotations

import copy
import logging
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from ckptstore import CheckpointManager, open_run
from ckptstore.errors import CorruptionError
from ckptstore.testing.raw import RawDirectory
from tests.unit.reader.stored import flip, keys, raw_of
from tests.unit.reader.training import Training, new_url
from tests.unit.state.same import assert_same

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptstore.testing.raw import RawView

FLIPS = {"payload": 80, "header": 60, "manifest": 80, "journal": 80, "RUN.json": 20}


def positions(raw: RawView) -> list[tuple[str, str, int]]:
    """Return what to flip: kind, key, bit; the same on every run."""
    draw = random.Random(7)
    payload, manifest = keys(raw, "payload", 2)[0], keys(raw, "manifest", 2)[0]
    size = {key: 8 * len(raw.read(key) or b"") for key in (payload, manifest, "RUN.json", *keys(raw, "journal"))}
    header = 8 * 4096
    found = []
    for kind, count in FLIPS.items():
        for _ in range(count):
            if kind == "payload":
                place = payload, draw.randrange(header, size[payload])
            elif kind == "header":
                place = payload, draw.randrange(header) if draw.random() < 0.5 else draw.randrange(8 * 200)
            elif kind == "manifest":
                place = manifest, draw.randrange(size[manifest])
            else:
                key = "RUN.json" if kind == "RUN.json" else draw.choice(keys(raw, "journal"))
                place = key, draw.randrange(size[key])
            found.append((kind, *place))
    return found


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_no_single_bit_is_inverted_unnoticed(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = new_url() if kind == "memory" else str(tmp_path / "run")
    training = Training()
    training.step()
    with CheckpointManager(url) as manager:
        manager.save(1, **training.states(), seed=1)
        training.step()
        manager.save(2, **training.states(), seed=2)
    raw: RawView = raw_of(url) if kind == "memory" else RawDirectory(Path(url))
    newest = keys(raw, "journal")[-1]
    before = training.content()
    run = open_run(url)
    intact = run.at(step=2)
    assert run.verify().ok
    name = next(iter(intact.manifest().tensors))
    wrong: list[Any] = []
    for what, key, bit in positions(raw):
        body = raw.read(key)
        assert body is not None
        flip(raw, key, bit)
        reading: dict[str, Callable[[], object]] = {
            "full load": intact.load,
            "partial load": lambda: intact.load(only="model"),
            "one tensor": lambda: intact.tensor(name),
            "restore": lambda: intact.restore(**training.states()),
        }
        if what in {"payload", "header", "manifest"}:
            for how, read in reading.items():
                try:
                    read()
                except CorruptionError as error:
                    if key not in str(error) or (what != "manifest" and "tensors there: " not in str(error)):
                        wrong.append((what, bit, how, str(error)))
                else:
                    wrong.append((what, bit, how, "read without an error"))
            if intact.verify().ok:
                wrong.append((what, bit, "Checkpoint.verify"))
        else:  # a reader of the damaged record says so and goes on with what is sound
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                steps = [item.step for item in open_run(url).checkpoints()]
            said = ("RUN.json" if what == "RUN.json" else "journal record") in caplog.text
            if said != (key in {newest, "RUN.json"}):
                wrong.append((what, bit, "open", caplog.text))
            if steps != ([1] if key == newest else [1, 2]):
                wrong.append((what, bit, "checkpoints", steps))
        if run.verify().ok or open_run(url).verify().ok:
            wrong.append((what, bit, "Run.verify"))
        raw.write(key, body)
    assert wrong == []
    assert_same(training.content(), before)
    assert run.verify().ok


def test_a_partial_read_proves_the_parts_it_touches_and_no_others() -> None:
    url = new_url()
    state = {name: torch.full((5 << 20,), float(n)) for n, name in enumerate("abc")}  # 20 MiB each, over 16 MiB parts
    with CheckpointManager(url, rng=False) as manager:
        manager.save(1, state=state, seed=1)
    raw = raw_of(url)
    key = keys(raw, "payload")[0]
    flip(raw, key, 8 * (4096 + (50 << 20)))  # in the middle of c
    found = open_run(url).at(step=1)
    assert_same(found.load(only=["state/a", "seed"]), {"state": {"a": state["a"]}, "seed": 1})
    assert_same(found.tensor("state/a"), state["a"])
    for read in (
        found.load,
        lambda: found.load(only="state/c"),
        lambda: found.tensor("state/c"),
        lambda: found.restore(state=copy.deepcopy(state)),
    ):
        with pytest.raises(CorruptionError, match=r"000\.safetensors is damaged: bytes .*tensors there: state/c"):
            read()
    report = found.verify()
    assert [problem.key for problem in report.problems] == [key]
    assert "state/c" in report.problems[0].reason
    assert found.verify(deep=False).ok


def test_a_swap_of_two_whole_containers_is_found() -> None:
    url = new_url()
    model = nn.Linear(3, 3)
    with CheckpointManager(url) as manager:
        for step in (1, 2):
            nn.init.constant_(model.weight, step)
            manager.save(step, model=model, wait=True)
    raw = raw_of(url)
    first, second = (keys(raw, "payload", step)[0] for step in (1, 2))
    raw.write(second, raw.read(first) or b"")
    with pytest.raises(CorruptionError, match="is damaged"):
        open_run(url).latest().load()  # type: ignore[union-attr]
    first, second = (keys(raw, "manifest", step)[0] for step in (1, 2))
    raw.write(second, raw.read(first) or b"")
    with pytest.raises(CorruptionError, match=r"000000000002-.*MANIFEST"):
        open_run(url).latest().load()  # type: ignore[union-attr]
    first, second = keys(raw, "journal")[-2:]
    raw.write(second, raw.read(first) or b"")
    report = open_run(url).verify()
    assert "copy from another place" in report.journal[0]
