"""Which random numbers would have come next?

Every generator that training draws from without being handed one: torch's on the CPU and on each accelerator in use,
Python's, and numpy's if it is loaded. Looking starts no accelerator: one that isn't initialised has drawn nothing.
Restoring checks every state first, on a generator of its own where there is one, and sets them only then: all or none.
"""

from __future__ import annotations

import random
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ckptstore.errors import CorruptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["capture", "restore"]


def capture() -> dict[str, Any]:
    """The states of all generators now, as plain values and CPU tensors that ``tree.encode`` takes.

    Keys: "torch", "python", and where they are in use "numpy", "cuda", "xpu" (one state per device) and "mps".
    """
    captured: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        captured["numpy"] = numpy.random.get_state(legacy=False)
    for name, module in _accelerators().items():
        captured[name] = module.get_rng_state() if name == "mps" else module.get_rng_state_all()
    return captured


def restore(captured: Mapping[str, Any]) -> list[str]:
    """Set the generators to *captured*; says in words what of it has no place here. Calling it starts no accelerator.

    Raises:
        CorruptionError: a state isn't one of its generator; nothing was set.
    """
    left: list[str] = []
    setters: list[Callable[[], object]] = []
    accelerators = _accelerators()
    for name, state in captured.items():
        try:
            if name == "torch":
                setters.append(_for_torch(torch.Generator(), state, torch.set_rng_state))
            elif name == "python":
                _check_python(state)
                setters.append(partial(random.setstate, state))
            elif name == "numpy":
                left.extend(_for_numpy(state, setters))
            elif name not in accelerators:
                left.append(f"the {name} generator's state: {name} isn't in use in this process")
            elif name == "mps":
                setters.append(_for_torch(torch.Generator("mps"), state, accelerators[name].set_rng_state))
            else:
                left.extend(_for_devices(name, accelerators[name], state, setters))
        except (IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
            message = f"the saved state of the random generator {name!r} isn't one: {error}"
            raise CorruptionError(message, operation="restore", key=f"rng/{name}") from error
    for set_state in setters:
        set_state()
    return left


def _accelerators() -> dict[str, Any]:
    """The modules of the accelerators that this process already uses."""
    found: dict[str, Any] = {}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda
    if torch.xpu.is_initialized():  # type: ignore[no-untyped-call]
        found["xpu"] = torch.xpu
    if torch.backends.mps.is_available():
        found["mps"] = torch.mps
    return found


def _for_torch(
    trial: torch.Generator, state: object, set_state: Callable[[torch.Tensor], object]
) -> Callable[[], object]:
    if not isinstance(state, torch.Tensor):
        message = f"a tensor was expected, not {type(state).__name__}"
        raise TypeError(message)
    host = state.cpu()  # states live on the host, wherever the rest of the checkpoint was mapped to
    trial.set_state(host)
    return partial(set_state, host)


def _check_python(state: Any) -> None:  # whatever was stored
    random.Random().setstate(state)  # noqa: S311  # a trial run, nothing is drawn
    if state[2] is not None and type(state[2]) is not float:
        message = "its pending Gaussian isn't a number"  # Python itself doesn't look
        raise TypeError(message)


def _for_numpy(state: Any, setters: list[Callable[[], object]]) -> list[str]:  # whatever was stored
    try:
        from numpy import random as numpy_random  # only a state of numpy's asks for numpy
    except ImportError:
        return ["numpy's generator state: numpy isn't installed here"]
    saved, kind = state["bit_generator"], numpy_random.get_state(legacy=False)["bit_generator"]  # noqa: NPY002
    if saved != kind:
        return [f"numpy's generator state: saved of {saved}, while this process uses {kind}"]
    if kind == "MT19937" and not 0 <= state["state"]["pos"] <= len(state["state"]["key"]):
        message = "its position lies outside its key"  # numpy itself doesn't look
        raise ValueError(message)
    numpy_random.RandomState(getattr(numpy_random, kind)()).set_state(state)
    setters.append(partial(numpy_random.set_state, state))  # the global generator is what was saved
    return []


def _for_devices(name: str, module: Any, states: Any, setters: list[Callable[[], object]]) -> list[str]:
    n_devices = module.device_count()
    for index, state in enumerate(states[:n_devices]):
        device = f"{name}:{index}"
        trial = torch.Generator(device)
        setters.append(_for_torch(trial, state, partial(module.set_rng_state, device=device)))
    return [f"the generator state of {name}:{index}: only {n_devices} here" for index in range(n_devices, len(states))]
