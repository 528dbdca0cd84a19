"""Decides by running: does an acquire site lose its lease on a normal way out, only by an exception, or not?

The program runs against a mock pool under every assignment of its flags and every choice of what raises and
what gives None. A lease nobody released or handed over at the end is lost; so is one that dies earlier,
because its last name was taken away. While an exception is under way a dying temporary stays undecided:
whether that exception is swallowed shows at the end.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from types import CodeType, SimpleNamespace
from typing import Any

from tests.flow.mock_pool import BY_A_CALL, BY_A_RELEASE, Choices, Flag, Run, leases_in
from tests.flow.programs import Program


class Verdict(StrEnum):
    NORMAL = "lost on a normal way out"
    SWALLOWED = "lost on a normal way out, after a handler swallowed what a call raised"
    OVERRULED = "lost in a cleanup after an exception overruled the return that was to hand it over"
    EXCEPTIONAL = "lost by an exception only"
    DOUBTFUL = "lost only where a release itself failed"
    KEPT = "never lost"


class TooManyPaths(Exception):
    """The program has more runs than we are willing to make."""


@dataclass(slots=True)
class _Losses:
    """The sites that lost their lease in some run, by the worst that can be said of that run."""

    counted: frozenset[str]
    by_verdict: dict[Verdict, set[int]] = field(
        default_factory=lambda: {verdict: set() for verdict in Verdict}
    )

    def ordinary(self, run: Run, sites: set[int]) -> None:
        verdict = Verdict.SWALLOWED if run.call_failed else Verdict.NORMAL
        self.by_verdict[verdict] |= sites - run.doubtful
        self.by_verdict[Verdict.DOUBTFUL] |= sites & run.doubtful

    def exceptional(self, run: Run, sites: set[int], why: str) -> None:
        """A release that fails is nobody's fault: what was held then is not lost by it, what is acquired
        after it is."""
        if why in self.counted:
            self.by_verdict[Verdict.EXCEPTIONAL] |= sites - run.doubtful

    def overruled(self, run: Run, sites: set[int]) -> None:
        """The analysis lets what a `return` had ready live on to the end of the function: it sees the loss,
        and calls it one by that exception."""
        self.by_verdict[Verdict.OVERRULED] |= sites - run.doubtful

    def of(self, site: int) -> Verdict:
        """Verdicts are listed with the worst first."""
        return next((verdict for verdict, sites in self.by_verdict.items() if site in sites), Verdict.KEPT)


def _run_once(code: CodeType, run: Run, losses: _Losses) -> None:
    scope: dict[str, Any] = {
        "reached": run.reached,
        "raising": run.raising,
        "unwind": run.unwind,
        "returned": run.returned,
    }
    exec(code, scope)
    flags = [Flag(run.choices) for _ in range(3)]
    holder = SimpleNamespace()
    sink: list[object] = []
    try:
        result = scope["target"](run, holder, sink, run.work, run.probe, *flags)
    except (ValueError, KeyError, RuntimeError, AssertionError) as error:
        run.unwinding = True
        losses.overruled(run, run.lost & run.returning)
        run.lost -= run.returning
        losses.exceptional(run, run.owed - leases_in([holder, sink]), "".join(error.args) or BY_A_STATEMENT)
    else:
        run.unwinding = True  # what dies from here on dies with the run
        losses.ordinary(run, run.owed - leases_in([result, holder, sink]))
    losses.ordinary(run, run.lost)


BY_A_STATEMENT = "raised by a statement"
COUNTED = {
    "none": frozenset(),
    "explicit": frozenset({BY_A_STATEMENT}),
    "calls": frozenset({BY_A_STATEMENT, BY_A_CALL, BY_A_RELEASE}),
}


def verdicts(program: Program, exceptions: str = "calls", limit: int = 4000) -> dict[int, Verdict]:
    """What becomes of each acquire site that some run reaches, by its number."""
    code = compile("\n".join(program.traced), "<program>", "exec")
    losses = _Losses(COUNTED[exceptions])
    taken: set[int] = set()
    raises = _raised(program)
    choices = Choices()
    for _ in range(limit):
        run = Run(choices, raises)
        _run_once(code, run, losses)
        taken |= run.taken
        if not choices.advance():
            return {site: losses.of(site) for site in sorted(taken)}
    raise TooManyPaths(f"more than {limit} runs")


def _raised(program: Program) -> tuple[type[Exception], ...]:
    """What a call may raise: only kinds that some handler of the program tells apart."""
    named = [kind for kind in (ValueError, KeyError) if f"except {kind.__name__}:" in program.source]
    return (RuntimeError, *named)
