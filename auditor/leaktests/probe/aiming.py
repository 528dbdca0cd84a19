"""Which arguments lead into the code of a finding: lines are watched while variations of the plan run."""

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os.path import realpath
from types import FrameType
from typing import Any

import msgspec

from auditor.leaktests.plan import Aim, Argument, Plan, Shape, Variation
from auditor.leaktests.probe import signatures
from auditor.leaktests.probe.running import Scope

MOST_VARIATIONS = 24
Lines = set[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class _Try:
    build: tuple[Argument, ...]
    feed: tuple[Argument, ...]
    shape: Shape
    scenario: str


def aimed_at(plan: Plan, thing: Any, scope: Scope, aims: Sequence[Aim], tried: int, seconds: float) -> Plan:
    """The plan, with a variation for every finding whose acquire one of them executes."""
    plan = msgspec.structs.replace(plan, tried=tried, seconds=round(seconds, 3))
    if not aims:
        return plan
    seen = [(trial, _lines_of(plan, thing, scope, trial, aims)) for trial in _trials(plan, thing)]
    found = []
    for aim in aims:
        reaching = [entry for entry in seen if (aim.location, aim.acquire) in entry[1]]
        if reaching:
            trial, _ = max(reaching, key=lambda e: sum((aim.location, line) in e[1] for line in aim.lines))
            found.append(
                Variation(
                    aim.fingerprint,
                    aim.code,
                    aim.where,
                    aim.message,
                    trial.build,
                    trial.feed,
                    trial.shape,
                    trial.scenario,
                    aim.by_exception,
                )
            )
    return msgspec.structs.replace(plan, aimed=tuple(found))


def _trials(plan: Plan, thing: Any) -> list[_Try]:
    """The plan itself with its pool on, its other shapes and scenarios, and each flag turned round."""
    on = {argument.name for argument in plan.switch}
    build = (*(a for a in plan.build if a.name not in on), *plan.switch)
    shape, scenario = plan.shapes[0], "train" if "train" in plan.scenarios else "no_grad"
    trials = [_Try(build, plan.feed, shape, scenario)]
    trials += [_Try(build, plan.feed, other, scenario) for other in plan.shapes[1:]]
    if "eval" in plan.scenarios:
        trials.append(_Try(build, plan.feed, shape, "eval"))
    forward = thing if plan.target.kind == "function" else getattr(thing, plan.method or "forward", None)
    if forward is not None:
        parameters = signatures.call(forward, skip_first=plan.target.kind != "function")
        trials += [_Try(build, feed, shape, scenario) for feed in _flipped(plan.feed, parameters)]
    if plan.target.kind == "module":
        flips = _flipped(build, signatures.constructor(thing))
        trials += [_Try(other, plan.feed, shape, scenario) for other in flips]
    return trials[:MOST_VARIATIONS]


def _flipped(
    given: tuple[Argument, ...], parameters: Sequence[signatures.Parameter]
) -> Iterator[tuple[Argument, ...]]:
    for parameter in parameters:
        if isinstance(parameter.default, bool) and "pool" not in parameter.name:
            others = tuple(a for a in given if a.name != parameter.name)
            yield (*others, Argument(parameter.name, str(not parameter.default)))


def _lines_of(plan: Plan, thing: Any, scope: Scope, trial: _Try, aims: Sequence[Aim]) -> Lines:
    from auditor.leaktests.probe.planning import Runner

    runner = Runner(plan.target, thing, plan.imports, scope, plan.method)
    lines: Lines = set()
    try:
        with _watched({aim.location for aim in aims}, lines):
            runner.run(trial.build, trial.feed, trial.shape, trial.scenario)
    except Exception:  # arguments that do not go together reach nothing
        return set()
    return lines


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
