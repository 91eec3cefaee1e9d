"""What a save takes, what it refuses before anything is written, and what is kept beside the state."""

from __future__ import annotations

import copy
import math
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from ckptstore import CheckpointManager, open_run
from ckptstore.errors import AlreadyExistsError, ConfigError, NotSavedError, UnstorableError
from tests.unit.reader.stored import raw_of
from tests.unit.reader.training import new_url

if TYPE_CHECKING:
    from collections.abc import Callable


def stored_keys(url: str) -> set[str]:
    return raw_of(url).keys()


@pytest.mark.parametrize("step", [True, 1.0, "1", None, -1, 2**60, np.float32(3), 2**53, [1]], ids=repr)
def test_what_is_no_step_is_refused_with_its_type_and_nothing_is_written(step: Any) -> None:
    url = new_url()
    with CheckpointManager(url, every=1) as manager:
        for call in (manager.save, manager.step):
            with pytest.raises(ConfigError, match=r"steps are integers|is not between 0 and 2\^53"):
                call(step, x=1)
        if step is not None:
            with pytest.raises(ConfigError):
                manager.resume(step=step, x=1)
    assert stored_keys(url) == set()


@pytest.mark.parametrize("step", [0, np.int64(7), np.uint8(7), 2**53 - 1], ids=repr)
def test_any_integer_is_a_step(step: Any) -> None:
    url = new_url()
    with CheckpointManager(url) as manager:
        handle = manager.save(step, x=1, wait=True)
        assert type(handle.step) is int
        assert manager.latest().step == int(step)  # type: ignore[union-attr]
        with pytest.raises(AlreadyExistsError):
            manager.save(step, x=1)
        assert manager.resume(x=1).step == int(step)


def test_a_step_that_is_not_above_the_newest_is_refused_or_skipped_before_any_work() -> None:
    class Counting:
        asked = 0

        def state_dict(self) -> dict[str, Any]:
            self.asked += 1
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            """Nothing to load."""

    url = new_url()
    thing = Counting()
    with CheckpointManager(url) as manager:
        manager.save(5, thing=thing, wait=True)
        asked, before = thing.asked, stored_keys(url)
        for step in (5, 4, 0):
            with pytest.raises(AlreadyExistsError, match=f"step {step} is not above 5"):
                manager.save(step, thing=thing)
            handle = manager.save(step, thing=thing, if_exists="skip")
            assert (handle.status, handle.done()) == ("skipped", True)
            with pytest.raises(NotSavedError):
                handle.result()
        with pytest.raises(ConfigError, match="if_exists='overwrite'"):
            manager.save(6, thing=thing, if_exists="overwrite")  # type: ignore[arg-type]
    assert thing.asked == asked
    assert {key for key in stored_keys(url) if "alive" not in key} == {key for key in before if "alive" not in key}


class NoLoad:
    def state_dict(self) -> dict[str, Any]:
        return {}


class NoSave:
    def load_state_dict(self, state: Any) -> None:
        """Nothing to load."""


class Odd:
    """An object without state methods, whose content must not be shown."""

    def __repr__(self) -> str:
        return "hunter2"


class Meta:
    def state_dict(self) -> dict[str, Any]:
        return {"deep": [{"tensor": torch.empty(3, device="meta")}]}

    def load_state_dict(self, state: Any) -> None:
        """Nothing to load."""


UNSTORABLE: dict[str, tuple[Any, str]] = {
    "lambda": ({"deep": [1, {"fn": lambda: 0}]}, r"thing/deep/1/fn: .*function"),
    "object": (Odd(), r"thing.*Odd"),
    "object in a list": ([1, Odd()], r"thing/1: .*Odd"),
    "class": (nn.Linear, r"state 'thing': a class \(torch\.nn\.modules\.linear\.Linear\)"),
    "no load_state_dict": (NoLoad(), r"state 'thing': an object with no load_state_dict .*NoLoad"),
    "no state_dict": (NoSave(), r"state 'thing': an object with no state_dict .*NoSave"),
    "meta tensor": (Meta(), r"thing/deep/0/tensor: .*meta tensor"),
    "module in a dict": ({"model": nn.Linear(1, 1)}, r"thing/model: .*Linear"),
}


@pytest.mark.parametrize("case", UNSTORABLE)
def test_what_cannot_be_stored_is_refused_in_the_save_call_with_path_and_type_and_nothing_is_written(case: str) -> None:
    thing, message = UNSTORABLE[case]
    url = new_url()
    with CheckpointManager(url) as manager:
        with pytest.raises(UnstorableError, match=message) as caught:
            manager.save(1, fine=torch.ones(3), thing=thing)
        assert "hunter2" not in str(caught.value)
        assert stored_keys(url) == set()
        manager.save(1, fine=torch.ones(3), wait=True)  # and the next save works
        before = {key for key in stored_keys(url) if "alive" not in key}
        with pytest.raises(UnstorableError, match=message):
            manager.save(2, fine=torch.ones(3), thing=thing)
        assert {key for key in stored_keys(url) if "alive" not in key} == before


def test_metrics_come_back_as_the_numbers_they_were() -> None:
    url = new_url()
    metrics = {
        "loss": torch.tensor(0.5),
        "one": torch.ones(1, 1),
        "count": torch.tensor(3),
        "numpy": np.float32(0.25),
        "plain": 3,
        "nan": math.nan,
        "inf": math.inf,
        "minus": torch.tensor(-math.inf),
        "big": 2**60,
        "odd name/ü": 1.0,
    }
    with CheckpointManager(url) as manager:
        manager.save(1, x=1, metrics=metrics, wait=True)
        found = manager.latest().metrics  # type: ignore[union-attr]
    assert math.isnan(found.pop("nan"))
    assert found == {
        "loss": 0.5,
        "one": 1.0,
        "count": 3,
        "numpy": 0.25,
        "plain": 3,
        "inf": math.inf,
        "minus": -math.inf,
        "big": 2.0**60,
        "odd name/ü": 1.0,
    }


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a metric that is text": ({"metrics": {"a": "nan"}}, r"metric 'a': 'nan' \(str\) is not a number"),
    "a metric that is a vector": ({"metrics": {"a": torch.ones(2)}}, "metric 'a'"),
    "a metric that is a flag": ({"metrics": {"a": True}}, "metric 'a'"),
    "a metric that is complex": ({"metrics": {"a": torch.tensor(1j)}}, "metric 'a'"),
    "too many metrics": ({"metrics": {f"m{n}": n for n in range(33)}}, "33 metrics"),
    "too many tags": ({"tags": [f"t{n}" for n in range(17)]}, "17 tags"),
    "too long a tag": ({"tags": ["t" * 3000]}, "at most 2048"),
    "one text for tags": ({"tags": "best"}, "tags='best'"),
    "an empty tag": ({"tags": [""]}, "non-empty strings"),
    "metadata that is no JSON": ({"metadata": {"a": object()}}, "metadata must be JSON"),
    "metadata that is not finite": ({"metadata": {"a": math.nan}}, "metadata must be JSON"),
    "too much metadata": ({"metadata": {"a": "x" * (2 << 20)}}, "metadata takes more than"),
    "a reserved name": ({"verify": 1}, "verify can't be the name of a state"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_beyond_the_bounds_is_refused_and_no_checkpoint_comes_of_it(case: str) -> None:
    arguments, message = REFUSED[case]
    url = new_url()
    with CheckpointManager(url) as manager:
        manager.save(1, x=1, wait=True)
        with pytest.raises(ConfigError, match=message):
            manager.save(2, x=1, wait=True, **arguments)
        assert manager.latest().step == 1  # type: ignore[union-attr]
        manager.save(2, x=1, wait=True)
    assert [item.step for item in open_run(url).checkpoints()] == [1, 2]
    assert open_run(url).verify().ok


def test_tags_permanence_and_metadata_are_kept_with_the_checkpoint() -> None:
    url = new_url()
    with CheckpointManager(url, metadata={"lr": 0.1, "kind": "a"}) as manager:
        manager.save(
            1, x=1, tags=["best", "a", "best"], permanent=True, metadata={"kind": "b", "nested": {"π": [1, None]}}
        )
        manager.save(2, x=1, wait=True)
    one, two = open_run(url).checkpoints()
    assert (one.tags, one.permanent, two.tags, two.permanent) == (("a", "best"), True, (), False)
    assert one.manifest().user == {"lr": 0.1, "kind": "b", "nested": {"π": [1, None]}}
    assert two.manifest().user == {"lr": 0.1, "kind": "a"}
    assert (one.damaged, one.on_lineage) == (False, True)
    assert one.created.tzinfo is not None
    assert one.n_bytes == sum(file.size for file in one.manifest().files)


def test_many_metrics_and_tags_within_the_bounds_survive_many_records() -> None:
    url = new_url()
    with CheckpointManager(url, rng=False) as manager:
        for step in range(80):
            manager.save(step, x=step, metrics={f"m{n}": step + n for n in range(32)}, tags=[f"tag{step}"], wait=True)
    found = open_run(url).checkpoints()
    assert [item.step for item in found] == list(range(80))
    assert [item.tags for item in found] == [(f"tag{step}",) for step in range(80)]
    assert found[70].metrics["m31"] == 101
    assert found[70].load() == {"x": 70}
    assert open_run(url).verify().ok


def test_step_saves_when_a_multiple_was_reached_or_crossed() -> None:
    url = new_url()
    with CheckpointManager(url, every="10 steps") as manager:
        handles = {step: manager.step(step, x=step, wait=True) for step in (1, 9, 13, 19, 20, 20, 25, 47, 48)}
    assert [step for step, handle in handles.items() if handle is not None] == [13, 47]
    assert [item.step for item in open_run(url).checkpoints()] == [13, 20, 47]
    with CheckpointManager(url) as manager, pytest.raises(ConfigError, match="none was given"):
        manager.step(50, x=1)


def test_a_closed_manager_says_so_and_closing_twice_is_fine() -> None:
    url = new_url()
    manager = CheckpointManager(url, every=1)
    manager.save(1, x=1)
    manager.close()
    manager.close()
    calls: list[Callable[[], object]] = [
        lambda: manager.save(2, x=1),
        lambda: manager.step(2, x=1),
        lambda: manager.resume(x=1),
        manager.latest,
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="closed"):
            call()


def test_a_manager_and_a_handle_refuse_to_be_pickled_or_copied() -> None:
    with CheckpointManager(new_url()) as manager:
        handle = manager.save(1, x=1)
        for thing in (manager, handle):
            for copier in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(TypeError, match="can't be pickled"):
                    copier(thing)


def test_an_error_in_the_block_is_not_masked_by_closing() -> None:
    url = new_url()

    def train() -> None:
        with CheckpointManager(url) as manager:
            manager.save(1, x=1)
            message = "training broke"
            raise RuntimeError(message)

    with pytest.raises(RuntimeError, match="training broke"):
        train()
    assert open_run(url).latest().step == 1  # type: ignore[union-attr]


def test_making_a_manager_writes_nothing() -> None:
    url = new_url()
    with CheckpointManager(url) as manager:
        assert manager.latest() is None
    assert stored_keys(url) == set()


@pytest.mark.parametrize(
    "options",
    [{"takeover": "yes"}, {"takeover": 1}, {"every": "now"}, {"metadata": {"a": {1}}}, {"storage_options": {"a": 1}}],
)
def test_a_wrong_option_is_refused_when_the_manager_is_made(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CheckpointManager(new_url(), **options)
