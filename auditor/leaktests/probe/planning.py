"""From a way that ran once to a plan: other shapes, both modes, gradients, the pool's switch, and the findings."""

import time
from types import ModuleType
from typing import Any

import torch

from auditor.leaktests.plan import Argument, Plan, Recipe, Request, Shape, Target, Unplanned
from auditor.leaktests.probe import signatures
from auditor.leaktests.probe.aiming import aimed_at
from auditor.leaktests.probe.arguments import Proposer
from auditor.leaktests.probe.running import NothingComesOut, Ran, Scope, said, step
from auditor.leaktests.probe.search import Attempts, NoPlan, Search, Way, is_abstract
from auditor.leaktests.support.pools import pools_of

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
    """Built afresh, every shape and mode that runs is kept; the first must."""
    runner = Runner(target, thing, way.imports, scope, recipe.method)
    shapes, modes, ran = [], [], None
    for shape in recipe.shapes or SHAPES:
        try:
            result = runner.run(way.build, way.feed, shape, "train")
        except Exception as error:
            if ran is None and shape == (recipe.shapes or SHAPES)[0]:
                raise NoPlan(f"it ran once, but not when built again: {said(error)}") from error
            continue
        ran = ran or result
        shapes.append(shape)
    assert ran is not None
    for mode in recipe.modes or (("train", "eval") if target.kind == "module" else ("train",)):
        if mode == "train" or _runs(runner, way, shapes[0], mode):
            modes.append(mode)
    switch, pooled = _switch(runner, thing, way, shapes[0]) if target.kind == "module" else ((), False)
    return Plan(
        target,
        way.build,
        way.feed,
        tuple(shapes),
        tuple(modes),
        ran.differentiable,
        ran.operations,
        way.imports,
        switch,
        pooled,
        recipe.method,
        "recipe" if recipe.feed or recipe.build or recipe.args else "signature",
    )


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

    def run(
        self, build: tuple[Argument, ...], feed: tuple[Argument, ...], shape: Shape, mode: str
    ) -> Ran:
        """One step."""
        built = self.build(build)
        if isinstance(built, torch.nn.Module):
            built.train(mode == "train")
        callee = getattr(built, self.method) if self.method else built
        return step(callee, self.scope.arguments(feed, shape, self.imports))


def _runs(runner: Runner, way: Way, shape: Shape, mode: str) -> bool:
    try:
        runner.run(way.build, way.feed, shape, mode)
    except Exception:  # a mode that does not run is not part of the plan; the plan says which ones are
        return False
    return True


def _switch(
    runner: Runner, thing: Any, way: Way, shape: Shape
) -> tuple[tuple[Argument, ...], bool]:
    """The arguments that turn the pool on for tensors of any size, and whether a pool is then there."""
    parameters = signatures.constructor(thing)
    names = [p.name for p in parameters if any(word in p.name for word in _SWITCHES)]
    on = [
        Argument(p.name, "True")
        for p in parameters
        if p.name in names and isinstance(p.default, bool) and "threshold" not in p.name
    ]
    if not on:
        return (), _has_pool(runner, way.build, way.feed, shape)
    small = [Argument(p.name, "0.0") for p in parameters if "threshold" in p.name and "pool" in p.name]
    others = tuple(a for a in way.build if a.name not in names)
    for switch in ((*on, *small), tuple(on)):
        if _has_pool(runner, (*others, *switch), way.feed, shape):
            return switch, True
    return (), False


def _has_pool(
    runner: Runner, build: tuple[Argument, ...], feed: tuple[Argument, ...], shape: Shape
) -> bool:
    """Whether it runs so, with a pool in one of its attributes."""
    try:
        built = runner.build(build)
        step(built, runner.scope.arguments(feed, shape, runner.imports))
    except Exception:  # then this is not how its pool is turned on
        return False
    return bool(pools_of(built))
