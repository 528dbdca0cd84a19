"""Which arguments lead into the code of a finding: lines are watched while variations of the plan run."""

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os.path import realpath
from types import FrameType, ModuleType
from typing import Any

import msgspec

from auditor.leaktests.plan import Aim, Argument, Plan, Shape, Variation
from auditor.leaktests.probe import signatures
from auditor.leaktests.probe.circumstances import other_feeds, sequels
from auditor.leaktests.probe.lending import left_lent, pool_classes
from auditor.leaktests.support.pools import may_refuse
from auditor.leaktests.support.scenarios import followed_by, make_step

MOST_VARIATIONS = 32
MANY: Shape = (4096, 1)
"""Many sequences of one token: what is small for one of them is large enough for a pool's threshold."""
Lines = set[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class _Try:
    build: tuple[Argument, ...]
    feed: tuple[Argument, ...]
    shape: Shape
    scenario: str
    then: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a try executed, and the aims that it left a lease for."""

    trial: _Try
    lines: Lines
    shown: set[str]

    def worth(self, aim: Aim) -> tuple[bool, int]:
        """How well it serves an aim."""
        executed = sum((aim.location, line) in self.lines for line in aim.lines)
        return aim.fingerprint in self.shown, executed


def aimed_at(
    plan: Plan, runner: Any, module: ModuleType, aims: Sequence[Aim], tried: int, seconds: float
) -> Plan:
    """The plan, with a variation for every finding whose acquire one of them executes."""
    plan = msgspec.structs.replace(plan, tried=tried, seconds=round(seconds, 3))
    if not aims:
        return plan
    pools = pool_classes(plan.target.root, module)
    seen = [_observed(plan, runner, trial, aims, pools) for trial in _trials(plan, runner, aims)]
    found = []
    for aim in aims:
        reaching = [entry for entry in seen if (aim.location, aim.acquire) in entry.lines]
        if reaching:
            best = max(reaching, key=lambda entry: entry.worth(aim))
            found.append(_variation(aim, best, pools))
    return msgspec.structs.replace(plan, aimed=tuple(found))


def _variation(aim: Aim, best: _Seen, pools: Sequence[type]) -> Variation:
    shown = aim.fingerprint in best.shown
    trial = best.trial
    return Variation(
        aim.fingerprint,
        aim.code,
        aim.where,
        aim.message,
        trial.build,
        trial.feed,
        trial.shape,
        trial.scenario,
        "" if shown else _faults(aim, pools),
        tuple(kind.__name__ for kind in pools),
        tuple(f"from {kind.__module__} import {kind.__name__}" for kind in pools),
        trial.then,
        shown,
    )


def _faults(aim: Aim, pools: Sequence[type]) -> str:
    """Of several acquires one may also fail by answering None."""
    if not aim.by_exception:
        return ""
    return "refusals" if aim.code == "PA109" and any(map(may_refuse, pools)) else "operations"


def _trials(plan: Plan, runner: Any, aims: Sequence[Aim]) -> list[_Try]:
    """The plan itself with its pool on, its other shapes and scenarios, other circumstances, and each flag
    turned round.
    """
    thing = runner.thing
    on = {argument.name for argument in plan.switch}
    build = (*(a for a in plan.build if a.name not in on), *plan.switch)
    shape, scenario = plan.shapes[0], _usual(plan)
    modes: list[str] = [name for name in ("eval", "no_grad") if name in plan.scenarios and name != scenario]
    modes += ["interrupted"] if plan.target.kind == "code" else []
    modes += ["rebuilt"] if isinstance(thing, type) and plan.target.kind != "autograd" else []
    trials = [_Try(build, plan.feed, shape, mode) for mode in (scenario, *modes)]
    single = scenario if "no_grad" not in plan.scenarios else "no_grad"
    trials += [_Try(build, plan.feed, other, scenario) for other in plan.shapes[1:]]
    trials.append(_Try(build, plan.feed, MANY, single))
    feeds = (plan.feed, *other_feeds(plan.feed, runner.scope, plan.imports))
    trials += [_Try(build, feed, shape, single) for feed in feeds[1:]]
    for name in sequels(thing, plan.method, aims):
        trials += [_Try(build, feed, shape, single, (name,)) for feed in feeds]
    forward = thing if not isinstance(thing, type) else getattr(thing, plan.method or "forward", None)
    if forward is not None:
        parameters = signatures.call(forward, skip_first=isinstance(thing, type))
        trials += [_Try(build, feed, shape, single) for feed in _flipped(plan.feed, parameters)]
    if isinstance(thing, type):
        flips = _flipped(build, signatures.constructor(thing))
        trials += [_Try(other, plan.feed, shape, single) for other in flips]
    return trials[:MOST_VARIATIONS]


def _usual(plan: Plan) -> str:
    """A training step where one runs with the pool on."""
    able = plan.pool_scenarios or plan.scenarios
    return "train" if "train" in able else able[0]


def _flipped(
    given: tuple[Argument, ...], parameters: Sequence[signatures.Parameter]
) -> Iterator[tuple[Argument, ...]]:
    for parameter in parameters:
        if isinstance(parameter.default, bool) and "pool" not in parameter.name:
            others = tuple(a for a in given if a.name != parameter.name)
            yield (*others, Argument(parameter.name, str(not parameter.default)))


def _observed(plan: Plan, runner: Any, trial: _Try, aims: Sequence[Aim], pools: Sequence[type]) -> _Seen:
    lines: Lines = set()

    def feed(turn: int) -> Any:
        return runner.scope.arguments(trial.feed, trial.shape, plan.imports)

    try:
        with _watched({aim.location for aim in aims}, lines):
            step = make_step(lambda: _callee(runner, trial), feed, trial.scenario)
            shown = left_lent(step, pools, aims)
    except (Exception, SystemExit):  # arguments that do not go together reach nothing
        return _Seen(trial, set(), set())
    return _Seen(trial, lines, shown)


def _callee(runner: Any, trial: _Try) -> Any:
    callee = runner.callee(trial.build)
    return followed_by(callee, *trial.then) if trial.then else callee


@contextmanager
def _watched(locations: set[str], lines: Lines) -> Iterator[None]:
    """Every line of these files that runs, in this thread and in those it starts, is put into `lines`."""
    real: dict[str, str] = {}

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        place = real.setdefault(file, realpath(file))
        if place not in locations:
            return None
        lines.add((place, frame.f_lineno))
        return trace

    before = sys.gettrace()
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        threading.settrace(None)
