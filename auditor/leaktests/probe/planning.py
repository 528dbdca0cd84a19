"""From a way that ran once to a plan: other shapes, scenarios, gradients, the pool's switch, the findings."""

import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import msgspec
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
    owner, _, method = target.name.partition(".")
    thing = getattr(module, owner, None)
    if method == "__init__":
        method = "__repr__"  # what building takes is seen without a call of anything else
    if method:
        recipe = msgspec.structs.replace(recipe, method=method)
    if thing is None:
        return Unplanned(target, f"{target.module} has no {target.name} after being imported")
    if target.kind == "module" and is_abstract(thing) and not recipe.method:
        return Unplanned(target, "it has no forward of its own: there is nothing to run", abstract=True)
    patience = SEARCHING if isinstance(thing, type) and target.kind != "autograd" else SEARCHING / 3
    attempts = Attempts(patience, deadline=started + request.seconds * 0.6)
    scope = Scope(request.device)
    proposer = Proposer(module, target.name, request.known, request.configs)
    search = Search(target, thing, proposer, scope, recipe, attempts)
    try:
        way = search.way()
        runner = Runner(target, thing, way.imports, scope, recipe.method)
        plan = _single(target, way, recipe) if target.kind == "code" else _confirmed(runner, way, recipe)
    except (NoPlan, NothingComesOut) as error:
        best = search.best or Way((), (), ())
        told = tuple(dict.fromkeys(attempts.told))
        parts = bool(proposer.wanted_parts)
        return Unplanned(target, str(error), attempts.tried, False, parts, told, best.build, best.feed)
    return aimed_at(plan, runner, module, request.aims, attempts.tried, time.monotonic() - started)


def _single(target: Target, way: Way, recipe: Recipe) -> Plan:
    """For code that only a finding leads to: one call of it, whatever that returns."""
    shapes, origin = tuple(recipe.shapes or SHAPES[:1]), "recipe" if recipe.feed else "signature"
    return Plan(
        target,
        way.build,
        way.feed,
        shapes,
        ("called",),
        differentiable=False,
        operations=0,
        imports=way.imports,
        method=recipe.method,
        origin=origin,
    )


def _confirmed(runner: "Runner", way: Way, recipe: Recipe) -> Plan:
    """Built afresh, every shape and scenario that runs is kept; a training step at the first shape must."""
    target = runner.target
    usual = _usual(runner, way, (recipe.shapes or SHAPES)[0])
    shapes, steps = _shapes(runner, way, recipe.shapes or SHAPES, usual)
    runs, left_out = _scenarios(runner, way, tuple(shapes), recipe.scenarios)
    module = target.kind == "module"
    switch, pooled = _switch(runner, way, shapes[0], usual) if module else ((), False)
    on = (*(a for a in way.build if a.name not in {b.name for b in switch}), *switch)
    pool_runs = _scenarios(runner, way, tuple(shapes), runs, on)[0] if switch else runs
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
        tuple(pool_runs) if pooled else (),
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
            ran = runner.run(way.build, way.feed, shape, scenario, turn=len(shapes))
        except Exception as error:
            if not shapes:
                raise NoPlan(f"it ran once, but not when built again: {said(error)}") from error
            continue
        shapes.append(shape)
        steps.append(ran)
    return shapes, steps


def _scenarios(
    runner: "Runner",
    way: Way,
    shapes: tuple[Shape, ...],
    wanted: Sequence[str],
    build: tuple[Argument, ...] | None = None,
) -> tuple[list[str], list[tuple[str, str]]]:
    """Those that run, and what stands against the others."""
    given = way.build if build is None else build
    runs: list[str] = []
    left_out: list[tuple[str, str]] = []
    for scenario in wanted or SCENARIOS:
        if runner.target.kind != "module" and scenario in ("eval", "deepcopied", "pickled"):
            continue  # it has neither modes nor state

        def feed(turn: int) -> Any:
            return runner.scope.arguments(way.feed, shapes[turn % len(shapes)], way.imports)

        try:
            step_of_it = make_step(lambda: runner.callee(given), feed, scenario)
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
        if self.target.kind == "autograd":
            return self.thing.apply
        if not isinstance(self.thing, type):
            return self.thing
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
        self,
        build: tuple[Argument, ...],
        feed: tuple[Argument, ...],
        shape: Shape,
        scenario: str,
        turn: int = 0,
    ) -> Ran:
        """One step, in training or not, on the very numbers of the tests' `feed(turn)`: how many operations
        a step has may hang on them.
        """
        built = self.build(build)
        if isinstance(built, torch.nn.Module):
            built.train(scenario == "train")
        callee = getattr(built, self.method) if self.method else built
        once = forward if scenario == "no_grad" else step
        torch.manual_seed(turn)
        return once(callee, self.scope.arguments(feed, shape, self.imports))


def _switch(runner: Runner, way: Way, shape: Shape, usual: str) -> tuple[tuple[Argument, ...], bool]:
    """The arguments that turn the pool on for tensors of any size, and whether a pool is then there."""
    parameters = signatures.constructor(runner.thing)
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
    for scenario in dict.fromkeys((usual, "no_grad")):  # what writes into pooled memory may refuse gradients
        try:
            runner.run(build, feed, shape, scenario)
            return bool(pools_of(runner.build(build)))
        except Exception:  # then this is not how its pool is turned on
            continue
    return False
