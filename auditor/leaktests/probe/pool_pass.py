"""What turns the pool of a target on, and where it lends: a test of leases that sees none proves nothing."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from auditor.leaktests.plan import Argument, Shape
from auditor.leaktests.probe import signatures
from auditor.leaktests.probe.attempts import Way
from auditor.leaktests.probe.running import Runner, said
from auditor.leaktests.support.faults import count_places
from auditor.leaktests.support.pools import pools_of
from auditor.leaktests.support.scenarios import Step

_MORE_SHAPES: tuple[Shape, ...] = ((2, 33), (2, 64))
"""Tried where nothing is lent at the usual ones: several sequences with a short last segment; longer ones."""
_SWITCHES = ("memory_pool", "use_pool", "pooling")


class PoolPass(NamedTuple):
    """The arguments that turn the pool on for tensors of any size, the shapes with the one that lends most
    among them and its index, the scenarios that lend there, and what stands against the rest. No scenarios:
    there is no pool pass.
    """

    shapes: tuple[Shape, ...]
    switch: tuple[Argument, ...] = ()
    shape: int = 0
    scenarios: tuple[str, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()


def pool_pass(
    runner: Runner, way: Way, shapes: tuple[Shape, ...], scenarios: Sequence[str], usual: str
) -> PoolPass:
    """The first way to turn the pool on in which something is lent."""
    left_out: list[tuple[str, str]] = []
    for switch in _switches(runner):
        build = switched(way.build, switch)
        name = f"the pool, with {', '.join(a.text for a in switch)}" if switch else "the pool"
        # What writes into pooled memory may refuse gradients.
        for scenario in dict.fromkeys((usual, "no_grad")):
            try:
                tried, lent = shapes, _lent(runner, build, way.feed, shapes, scenario)
                if lent and not any(lent):
                    tried = (*shapes, *_MORE_SHAPES)
                    lent = _lent(runner, build, way.feed, tried, scenario)
            except (
                Exception
            ) as error:  # other people's code: what it raises is said, in the tests' first lines
                left_out.append((name, said(error)))
                continue
            if any(lent):
                best = tried[lent.index(max(lent))]
                used = shapes if best in shapes else (*shapes, best)
                first = used.index(best)
                lends, others = runner.scenarios(build, way.feed, used, scenarios, _lends, first)
                named = [(f"{scenario}, with the pool", reason) for scenario, reason in others]
                return PoolPass(used, switch, first, tuple(lends), tuple(named))
            if lent:
                left_out.append((name, "it lends nothing at any of the shapes"))
                break
    return PoolPass(shapes, left_out=tuple(dict.fromkeys(left_out)))


def switched(build: tuple[Argument, ...], switch: tuple[Argument, ...]) -> tuple[Argument, ...]:
    """The arguments of the constructor with the pool on."""
    names = {argument.name for argument in switch}
    return (*(argument for argument in build if argument.name not in names), *switch)


def _switches(runner: Runner) -> list[tuple[Argument, ...]]:
    parameters = signatures.constructor(runner.thing)
    named = [p for p in parameters if any(word in p.name for word in _SWITCHES)]
    on = tuple(
        Argument(p.name, "True") for p in named if isinstance(p.default, bool) and "lightweight" not in p.name
    )
    if not on:
        return [()]
    small = tuple(Argument(p.name, "0.0") for p in parameters if "threshold" in p.name and "pool" in p.name)
    return [(*on, *small), on] if small else [on]


def _lent(
    runner: Runner,
    build: tuple[Argument, ...],
    feed: tuple[Argument, ...],
    shapes: Sequence[Shape],
    scenario: str,
) -> list[int]:
    """How often a step at each shape asks the pools in its attributes; nothing if there are none. Raises what
    the target raises.
    """
    built = runner.build(build)
    pools = pools_of(built)
    if not pools:
        return []
    steps = (partial(runner.run_on, built, feed, shape, scenario, turn) for turn, shape in enumerate(shapes))
    return [count_places(step, at="acquires", pools=pools) for step in steps]


def _lends(step: Step) -> str:
    return "" if count_places(step, at="acquires", pools=pools_of(step.target)) else "it lends nothing there"
