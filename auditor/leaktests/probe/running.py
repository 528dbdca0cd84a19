"""Runs the target once: builds it, feeds it, takes gradients, and says how that ended."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from auditor.leaktests.plan import Argument, Shape, Target
from auditor.leaktests.support.scenarios import Step, loss_of, make_step, tensors_in, with_gradients

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named values of one call."""


class NothingComesOut(Exception):
    """The call went well and returned no tensor: there is nothing to hold a test against."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A step that went well."""

    operations: int
    own: int  # of those, how many the call itself made
    differentiable: bool
    why_not: str = ""


class Scope:
    """The names that values may use: torch, the sizes, the device, and what the imports bring."""

    def __init__(self, device: str) -> None:
        self._names: dict[str, Any] = {"torch": torch, "device": device, "b": 2, "n": 32}
        self._imported: set[str] = set()

    def value(self, text: str, shape: Shape = (2, 32), imports: Sequence[str] = ()) -> Any:
        """Evaluate a value. What it raises is the caller's to judge."""
        for line in imports:
            if line not in self._imported:
                self._imported.add(line)
                exec(line, self._names)
        self._names["b"], self._names["n"] = shape
        return eval(text, self._names)

    def call(
        self,
        function: Any,
        given: Sequence[Argument],
        shape: Shape = (2, 32),
        imports: Sequence[str] = (),
    ) -> Any:
        """Call with values made afresh."""
        args, kwargs = self.arguments(given, shape, imports)
        return function(*args, **kwargs)

    def arguments(self, given: Sequence[Argument], shape: Shape, imports: Sequence[str] = ()) -> Inputs:
        """What an argument list comes to."""
        values = [(argument, self.value(argument.value, shape, imports)) for argument in given]
        positional = tuple(value for argument, value in values if argument.positional)
        return positional, {argument.name: value for argument, value in values if not argument.positional}


def run_once(step: Step) -> str:
    """Nothing stands against a step that raises nothing."""
    step()
    return ""


class Runner:
    """Builds a target anew and runs a step of it."""

    def __init__(
        self, target: Target, thing: Any, imports: tuple[str, ...], scope: Scope, method: str
    ) -> None:
        self.target, self.thing, self.imports = target, thing, imports
        self.scope, self.method = scope, method

    def build(self, arguments: tuple[Argument, ...]) -> Any:
        """The object that is called."""
        if self.target.kind == "autograd":
            return self.thing.apply
        if not isinstance(self.thing, type):
            return self.thing
        torch.manual_seed(0)
        built = self.scope.call(self.thing, arguments, imports=self.imports)
        if isinstance(built, torch.nn.Module):
            built.to(self.scope.value("device"))
        return built

    def callee(self, arguments: tuple[Argument, ...]) -> Any:
        """What a step calls: the object itself, or the method that a recipe names."""
        built = self.build(arguments)
        return getattr(built, self.method) if self.method else built

    def run(
        self,
        build: tuple[Argument, ...],
        feed: tuple[Argument, ...],
        shape: Shape,
        scenario: str,
        turn: int = 0,
    ) -> Ran:
        """One step of the target built afresh."""
        return self.run_on(self.build(build), feed, shape, scenario, turn)

    def run_on(
        self, built: Any, feed: tuple[Argument, ...], shape: Shape, scenario: str, turn: int = 0
    ) -> Ran:
        """One step, in training or not, on the very numbers of the tests' `feed(turn)`: how many operations
        a step has may hang on them.
        """
        if isinstance(built, torch.nn.Module):
            built.train(scenario == "train")
        callee = getattr(built, self.method) if self.method else built
        once = forward if scenario == "no_grad" else step
        torch.manual_seed(turn)
        return once(callee, self.scope.arguments(feed, shape, self.imports))

    def scenarios(
        self,
        build: tuple[Argument, ...],
        feed: tuple[Argument, ...],
        shapes: tuple[Shape, ...],
        wanted: Sequence[str],
        look: Callable[[Step], str] = run_once,
        first: int = 0,
    ) -> tuple[list[str], list[tuple[str, str]]]:
        """Those that run, and what stands against the others: what was raised, or what `look` says of a step.
        The first turn is fed the shape of this index.
        """
        runs: list[str] = []
        left_out: list[tuple[str, str]] = []

        def inputs(turn: int) -> Inputs:
            return self.scope.arguments(feed, shapes[(turn + first) % len(shapes)], self.imports)

        for scenario in wanted:
            try:
                against = look(make_step(lambda: self.callee(build), inputs, scenario))
            except Exception as error:
                against = said(error)
            if against:
                left_out.append((scenario, against))
            else:
                runs.append(scenario)
        return runs, left_out


def wants_no_gradients(error: BaseException) -> bool:
    """Whether the code refuses gradients, as what writes into pooled memory does: it may run without."""
    said_of_it = str(error)
    return isinstance(error, RuntimeError) and ("differentiation" in said_of_it or "grad" in said_of_it)


def forward(target: Any, inputs: tuple[tuple[Any, ...], Mapping[str, Any]]) -> Ran:
    """One call without gradients, with the operations counted."""
    torch.manual_seed(0)
    counter = _Counter()
    with torch.no_grad(), counter:
        tensors_or_raise(target(*inputs[0], **inputs[1]))
    return Ran(counter.operations, counter.operations, False)


def step(target: Any, inputs: tuple[tuple[Any, ...], Mapping[str, Any]]) -> Ran:
    """Forward and, where something can be differentiated, backward, with the operations counted."""
    torch.manual_seed(0)
    counter = _Counter()
    why_not = ""
    with counter:
        args, kwargs = with_gradients((inputs[0], dict(inputs[1])))
        before = counter.operations
        outputs = target(*args, **kwargs)
        own = counter.operations - before
        tensors_or_raise(outputs)
        loss = loss_of(outputs)
        if loss is not None:
            try:
                loss.backward()  # type: ignore[no-untyped-call]
            except Exception as error:
                loss, why_not = None, said(error)
    return Ran(counter.operations, own, loss is not None, why_not)


def tensors_or_raise(outputs: Any) -> None:
    """Raises NothingComesOut."""
    if next(tensors_in(outputs), None) is None:
        raise NothingComesOut(f"the call returned {type(outputs).__name__}, in which there is no tensor")


def said(error: BaseException) -> str:
    """An error in one line, short."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."


def raised_at(error: BaseException) -> str:
    """Where an error came from, as `file:line`, innermost first outside torch."""
    trace, place = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if "/torch/" not in code.co_filename:
            place = f"{code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))
