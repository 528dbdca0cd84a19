"""From a way that ran once to a plan: other shapes, scenarios, gradients, the pool's switch, the findings."""

import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from auditor.leaktests.plan import Argument, Plan, Recipe, Request, Shape, Target, Unplanned
from auditor.leaktests.probe import signatures
from auditor.leaktests.probe.abstract import is_abstract
from auditor.leaktests.probe.aiming import aimed_at
from auditor.leaktests.probe.arguments import Proposer
from auditor.leaktests.probe.attempts import Attempts, NoPlan, Way
from auditor.leaktests.probe.running import (
    NothingComesOut,
    Ran,
    Scope,
    forward,
    said,
    step,
    wants_no_gradients,
)
from auditor.leaktests.probe.search import Search
from auditor.leaktests.support.pools import pools_of
from auditor.leaktests.support.scenarios import SCENARIOS, make_step

SHAPES: tuple[Shape, ...] = ((2, 32), (1, 33), (3, 16), (2, 1))
"""A usual one; one whose last segment is a single token; more and shorter sequences; single tokens."""
SEARCHING = 9.0
"""Seconds for combinations of one module; a third of it for a function."""
_SWITCHES = ("memory_pool", "use_pool", "pooling")


def plan_for(target: Target, module: ModuleType, request: Request) -> Plan | Unplanned:
    """A plan that ran just now, or why there is none."""
    started = time.monotonic()
    recipe = request.recipes.get(target.key, Recipe(target.key))
    thing = getattr(module, target.name, None)
    if thing is None:
        return Unplanned(target, f"{target.module} has no {target.name} after being imported")
    if target.kind == "module" and is_abstract(thing) and not recipe.method:
        return Unplanned(target, "it has no forward of its own: there is nothing to run", abstract=True)
    patience = SEARCHING if target.kind == "module" else SEARCHING / 3
    attempts = Attempts(deadline=started + min(patience, request.seconds * 0.6))
    scope = Scope(request.device)
    proposer = Proposer(module, target.name, request.known, request.configs)
    search = Search(target, thing, proposer, scope, recipe, attempts)
    try:
        way = search.way()
        plan = _confirmed(target, thing, way, scope, recipe)
    except (NoPlan, NothingComesOut) as error:
        best = search.best or Way((), (), ())
        told = tuple(dict.fromkeys(attempts.told))
        parts = bool(proposer.wanted_parts)
        return Unplanned(target, str(error), attempts.tried, False, parts, told, best.build, best.feed)
    return aimed_at(plan, thing, scope, request.aims, attempts.tried, time.monotonic() - started)


def _confirmed(target: Target, thing: Any, way: Way, scope: Scope, recipe: Recipe) -> Plan:
    """Built afresh, every shape and scenario that runs is kept; a training step at the first shape must."""
    runner = Runner(target, thing, way.imports, scope, recipe.method)
    usual = _usual(runner, way, (recipe.shapes or SHAPES)[0])
    shapes, steps = _shapes(runner, way, recipe.shapes or SHAPES, usual)
    runs, left_out = _scenarios(runner, way, tuple(shapes), recipe.scenarios)
    module = target.kind == "module"
    switch, pooled = _switch(runner, thing, way, shapes[0], usual) if module else ((), False)
    cheapest = min(range(len(steps)), key=lambda place: steps[place].operations)
    return Plan(
        target,
        way.build,
        way.feed,
        tuple(shapes),
        tuple(runs),
        steps[0].differentiable,
        steps[cheapest].operations if steps[cheapest].own else 0,
        cheapest,
        tuple(left_out),
        way.imports,
        switch,
        pooled,
        recipe.method,
        "recipe" if recipe.feed or recipe.build or recipe.args else "signature",
    )


def _usual(runner: "Runner", way: Way, shape: Shape) -> str:
    """`train`, or `no_grad` for code that refuses gradients; `_shapes` meets, and says, other failures."""
    try:
        runner.run(way.build, way.feed, shape, "train")
    except Exception as error:
        return "no_grad" if isinstance(error, RuntimeError) and wants_no_gradients(error) else "train"
    return "train"


def _shapes(
    runner: "Runner", way: Way, wanted: Sequence[Shape], scenario: str
) -> tuple[list[Shape], list[Ran]]:
    shapes: list[Shape] = []
    steps: list[Ran] = []
    for shape in wanted:
        try:
            ran = runner.run(way.build, way.feed, shape, scenario)
        except Exception as error:
            if not shapes:
                raise NoPlan(f"it ran once, but not when built again: {said(error)}") from error
            continue
        shapes.append(shape)
        steps.append(ran)
    return shapes, steps


def _scenarios(
    runner: "Runner", way: Way, shapes: tuple[Shape, ...], wanted: Sequence[str]
) -> tuple[list[str], list[tuple[str, str]]]:
    """Those that run, and what stands against the others."""
    runs: list[str] = []
    left_out: list[tuple[str, str]] = []
    for scenario in wanted or SCENARIOS:
        if runner.target.kind != "module" and scenario in ("eval", "deepcopied", "pickled"):
            continue  # it has neither modes nor state

        def feed(turn: int) -> Any:
            return runner.scope.arguments(way.feed, shapes[turn % len(shapes)], way.imports)

        try:
            step_of_it = make_step(lambda: runner.callee(way.build), feed, scenario)
            step_of_it()
        except Exception as error:
            left_out.append((scenario, said(error)))
        else:
            runs.append(scenario)
    return runs, left_out


class Runner:
    """Builds a target anew and runs a step of it."""

    def __init__(
        self, target: Target, thing: Any, imports: tuple[str, ...], scope: Scope, method: str
    ) -> None:
        self.target, self.thing, self.imports = target, thing, imports
        self.scope, self.method = scope, method

    def build(self, arguments: tuple[Argument, ...]) -> Any:
        """The object that is called."""
        if self.target.kind == "function":
            return self.thing
        if self.target.kind == "autograd":
            return self.thing.apply
        torch.manual_seed(0)
        built = self.scope.call(self.thing, arguments, SHAPES[0], self.imports)
        if isinstance(built, torch.nn.Module):
            built.to(self.scope.value("device"))
        return built

    def callee(self, arguments: tuple[Argument, ...]) -> Any:
        """What a step calls: the object itself, or the method that a recipe names."""
        built = self.build(arguments)
        return getattr(built, self.method) if self.method else built

    def run(
        self, build: tuple[Argument, ...], feed: tuple[Argument, ...], shape: Shape, scenario: str
    ) -> Ran:
        """One step, in training or not."""
        built = self.build(build)
        if isinstance(built, torch.nn.Module):
            built.train(scenario == "train")
        callee = getattr(built, self.method) if self.method else built
        once = forward if scenario == "no_grad" else step
        return once(callee, self.scope.arguments(feed, shape, self.imports))


def _switch(
    runner: Runner, thing: Any, way: Way, shape: Shape, usual: str
) -> tuple[tuple[Argument, ...], bool]:
    """The arguments that turn the pool on for tensors of any size, and whether a pool is then there."""
    parameters = signatures.constructor(thing)
    names = [p.name for p in parameters if any(word in p.name for word in _SWITCHES)]
    on = [
        Argument(p.name, "True")
        for p in parameters
        if p.name in names and isinstance(p.default, bool) and "lightweight" not in p.name
    ]
    if not on:
        return (), _has_pool(runner, way.build, way.feed, shape, usual)
    small = [Argument(p.name, "0.0") for p in parameters if "threshold" in p.name and "pool" in p.name]
    others = tuple(a for a in way.build if a.name not in names)
    for switch in ((*on, *small), tuple(on)):
        if _has_pool(runner, (*others, *switch), way.feed, shape, usual):
            return switch, True
    return (), False


def _has_pool(
    runner: Runner, build: tuple[Argument, ...], feed: tuple[Argument, ...], shape: Shape, usual: str
) -> bool:
    """Whether it runs so, with a pool in one of its attributes."""
    try:
        runner.run(build, feed, shape, usual)
        return bool(pools_of(runner.build(build)))
    except Exception:  # then this is not how its pool is turned on
        return False
