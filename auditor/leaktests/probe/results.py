"""What a target makes of seeded inputs, kept for the other version of it to be compared with.

It runs code that nobody has checked, one version in each process; a target that ends the process is the one
that was begun last.
"""

import faulthandler
import importlib
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import torch

from auditor.leaktests.plan import Plan, Replay, Replayed, Shape
from auditor.leaktests.probe.bits import difference
from auditor.leaktests.probe.planning import SHAPES
from auditor.leaktests.probe.running import Runner, Scope
from auditor.leaktests.support.randomness import set_seed
from auditor.leaktests.support.scenarios import loss_of, tensors_in, with_gradients

FORM = "the form of the output"
BROKEN = "the target"
Results = dict[str, torch.Tensor | str]
"""Tensors by what they are (`output 0`); texts for what is none: the form of the outputs, errors."""


def answer(request_file: Path, answers_file: Path) -> int:
    """Answer a request; its status is 0, for what goes wrong is in the answers."""
    replay = msgspec.json.decode(request_file.read_bytes(), type=Replay)
    folder = Path(replay.folder)
    with answers_file.open("ab", buffering=0) as answers:
        for number, told in _replayed(replay, folder):
            answers.write(msgspec.json.encode(Replayed(number, told)) + b"\n")
    return 0


def _replayed(replay: Replay, folder: Path) -> Iterator[tuple[int, str | None]]:
    """The number of a plan as it begins, with None, and again with what is different about it."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sys.path.insert(0, replay.root)
    for number, plan in enumerate(replay.plans):
        yield number, None
        faulthandler.dump_traceback_later(replay.seconds, exit=True)
        try:
            found = results_of(plan, importlib.import_module(plan.target.module), replay.device)
        except (
            BaseException
        ) as error:  # SystemExit too; whether the other version does the same is the question
            found = {BROKEN: type(error).__name__}
        faulthandler.cancel_dump_traceback_later()
        file = folder / f"{number}.pt"
        if not replay.compares:
            torch.save(found, file)
        yield number, _told(torch.load(file, weights_only=True), found) if replay.compares else ""


def _told(before: Results, after: Results) -> str:
    """What the first difference is; empty where there is none."""
    for name in [*before, *(name for name in after if name not in before)]:
        one, other = before.get(name), after.get(name)
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            if why := difference(one, other):
                return f"{name} {why}"
        elif not isinstance(one, str) or one != other:
            return f"{name}: {_shown(one)} before, {_shown(other)} after"
    return "" if any(name.endswith(FORM) for name in after) else "no call of it ends well: nothing to compare"


def _shown(result: torch.Tensor | str | None) -> str:
    if isinstance(result, torch.Tensor):
        return f"a tensor of {tuple(result.shape)}"
    return "nothing" if result is None else result


def results_of(plan: Plan, module: ModuleType, device: str) -> Results:
    """Everything that a caller can see, with gradients and without, for shapes that it takes or refuses."""
    thing = getattr(module, plan.target.name.partition(".")[0])
    runner = Runner(plan.target, thing, plan.imports, Scope(device), plan.method)
    found: Results = {}
    shapes = tuple(dict.fromkeys((*plan.shapes, *(SHAPES if plan.origin == "signature" else ()))))
    for mode, gradients in (("training", plan.differentiable), ("evaluation", False)):
        _seed(0)
        built = runner.build(plan.build)
        own = _Own(built, training=mode == "training")
        callee = getattr(built, plan.method) if plan.method else built
        found |= {f"{mode}: {name} as built": value for name, value in own.values().items()}
        for turn, shape in enumerate(shapes):
            once = _once(callee, own, _feed(runner, plan, shape), turn, gradients)
            found |= {f"{mode} at {shape}: {name}": value for name, value in once.items()}
        found |= {f"{mode}: {name} in the end": value for name, value in own.values().items()}
    return found


class _Own:
    """The parameters and buffers of a module; none of anything else."""

    def __init__(self, built: Any, *, training: bool) -> None:
        self._module = built if isinstance(built, torch.nn.Module) else torch.nn.Module()
        self._module.train(training)
        self.parameters = dict(self._module.named_parameters())

    def values(self) -> dict[str, torch.Tensor]:
        both = self.parameters | dict(self._module.named_buffers())
        return {name: value.detach().clone() for name, value in both.items()}


def _feed(runner: Runner, plan: Plan, shape: Shape) -> Callable[[], Any]:
    return lambda: runner.scope.arguments(plan.feed, shape, plan.imports)


def _once(callee: Any, own: _Own, feed: Callable[[], Any], turn: int, gradients: bool) -> Results:
    """One call. What it raises is a result too, of which the kind is compared, not the words."""
    for parameter in own.parameters.values():
        parameter.grad = None
    _seed(turn)
    args, kwargs = with_gradients(feed()) if gradients else feed()
    _seed(turn)
    found: Results = {}
    try:
        with torch.set_grad_enabled(gradients):
            outputs = callee(*args, **kwargs)
            found = {f"output {n}": out.detach().clone() for n, out in enumerate(tensors_in(outputs))}
            loss = loss_of(outputs)
            if loss is not None:
                loss.backward()  # type: ignore[no-untyped-call]
        found[FORM] = form(outputs)
    except Exception as error:
        found["an error"] = type(error).__name__
    given = {f"input {number}": leaf for number, leaf in enumerate(tensors_in((args, kwargs)))}
    found |= {f"{name} afterwards": leaf.detach().clone() for name, leaf in given.items()}
    leaves = given | own.parameters
    found |= {f"gradient of {n}": leaf.grad.clone() for n, leaf in leaves.items() if leaf.grad is not None}
    return found | {"random numbers afterwards": torch.rand(4)}


def _seed(number: int) -> None:
    set_seed(number)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


def form(value: Any) -> str:
    """The nesting of an output, with plain values spelled out: `(tensor, None, 3)`."""
    if isinstance(value, torch.Tensor):
        return "tensor"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{form(key)}: {form(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        inside = ", ".join(map(form, value))
        return f"{type(value).__name__}({inside})"
    if is_dataclass(value) and not isinstance(value, type):
        inside = ", ".join(f"{field.name}={form(getattr(value, field.name))}" for field in fields(value))
        return f"{type(value).__name__}({inside})"
    return type(value).__name__
