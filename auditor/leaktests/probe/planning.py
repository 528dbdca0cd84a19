"""From a way that ran once to a plan: other shapes, scenarios, gradients, the pool's switch, the findings."""

import time
from collections.abc import Sequence
from types import ModuleType

import msgspec

from auditor.leaktests.plan import Plan, Recipe, Request, Shape, Target, Unplanned
from auditor.leaktests.probe.abstract import is_abstract
from auditor.leaktests.probe.aiming import aimed_at
from auditor.leaktests.probe.arguments import Proposer
from auditor.leaktests.probe.attempts import Attempts, NoPlan, Way
from auditor.leaktests.probe.pool_pass import PoolPass, pool_pass
from auditor.leaktests.probe.running import (
    NothingComesOut,
    Ran,
    Runner,
    Scope,
    said,
    wants_no_gradients,
)
from auditor.leaktests.probe.search import Search
from auditor.leaktests.support.scenarios import SCENARIOS

SHAPES: tuple[Shape, ...] = ((2, 32), (1, 33), (3, 16), (2, 1))
"""A usual one; one whose last segment is a single token; more and shorter sequences; single tokens."""
_OF_MODULES = ("eval", "deepcopied", "pickled")
"""Scenarios of what has modes and state."""
SEARCHING = 9.0
"""Seconds for combinations of one module; a third of it for a function."""


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


def _confirmed(runner: Runner, way: Way, recipe: Recipe) -> Plan:
    """Built afresh, every shape and scenario that runs is kept; a training step at the first shape must."""
    target = runner.target
    module = target.kind == "module"
    usual = _usual(runner, way, (recipe.shapes or SHAPES)[0])
    shapes, steps = _shapes(runner, way, recipe.shapes or SHAPES, usual)
    wanted = [each for each in recipe.scenarios or SCENARIOS if module or each not in _OF_MODULES]
    runs, left_out = runner.scenarios(way.build, way.feed, tuple(shapes), wanted)
    if not runs:
        raise NoPlan(f"it ran once, but in no scenario: {left_out[0][1]}")
    if usual not in runs:  # backward fails: a step of another scenario has other operations
        usual = runs[0]
        shapes, steps = _shapes(runner, way, shapes, usual)
    pool = PoolPass(tuple(shapes))
    if module:
        pool = pool_pass(runner, way, tuple(shapes), runs, usual)
    cheapest = min(range(len(steps)), key=lambda place: steps[place].operations)
    return Plan(
        target,
        way.build,
        way.feed,
        pool.shapes,
        tuple(runs),
        steps[0].differentiable,
        steps[cheapest].operations if steps[cheapest].own else 0,
        cheapest,
        (*left_out, *pool.left_out),
        way.imports,
        pool.switch,
        pool.scenarios,
        pool.shape,
        recipe.method,
        "recipe" if recipe.feed or recipe.build or recipe.args else "signature",
    )


def _usual(runner: Runner, way: Way, shape: Shape) -> str:
    """`train`, or `no_grad` for code that refuses gradients; `_shapes` meets, and says, other failures."""
    try:
        runner.run(way.build, way.feed, shape, "train")
    except Exception as error:
        return "no_grad" if isinstance(error, RuntimeError) and wants_no_gradients(error) else "train"
    return "train"


def _shapes(
    runner: Runner, way: Way, wanted: Sequence[Shape], scenario: str
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
