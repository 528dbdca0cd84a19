"""Decides by running: does an acquire site lose its lease on a normal way out, only by an exception, or not?

The program runs against a mock pool under every assignment of its flags and every choice of what raises and
what gives None. A lease nobody released or handed over at the end is lost; so is one that dies earlier,
because its last name was taken away. While an exception is under way a dying temporary stays undecided:
whether that exception is swallowed shows at the end. Calls raise whatever `--exceptions` says: a handler that
swallows makes an ordinary way out of it. The option decides which exceptions count that leave the program.
"""

import sys
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from types import SimpleNamespace

from tests.flow.programs import Program


class Verdict(StrEnum):
    NORMAL = "lost on a normal way out"
    EXCEPTIONAL = "lost by an exception only"
    KEPT = "never lost"


class TooManyPaths(Exception):
    """The program has more runs than we are willing to make."""


@dataclass(slots=True)
class _Choices:
    """Replays a prefix of choices, then takes the first of each; `advance` moves to the next run."""

    taken: list[int] = field(default_factory=list)
    arity: list[int] = field(default_factory=list)
    position: int = 0

    def choose(self, count: int) -> int:
        if self.position == len(self.taken):
            self.taken.append(0)
            self.arity.append(count)
        self.position += 1
        return self.taken[self.position - 1]

    def advance(self) -> bool:
        while self.taken and self.taken[-1] + 1 == self.arity[-1]:
            self.taken.pop()
            self.arity.pop()
        if not self.taken:
            return False
        self.taken[-1] += 1
        self.position = 0
        return True


_BY_A_CALL = "raised by a call"


class _Lease:
    __slots__ = ("run", "site")

    def __init__(self, run: "_Run", site: int) -> None:
        self.run = run
        self.site = site

    def __del__(self) -> None:
        if self.site in self.run.owed and not self.run.unwinding:
            self.run.lost.add(self.site)


class _Flag:
    """A truth value that is decided when it is first asked for, and kept."""

    def __init__(self, choices: _Choices) -> None:
        self.choices = choices
        self.value: int | None = None

    def __bool__(self) -> bool:
        if self.value is None:
            self.value = self.choices.choose(2)
        return bool(self.value)


class _Scratch:
    """What `pool.lease` gives: a context manager that owes nobody anything."""

    def __enter__(self) -> object:
        return object()

    def __exit__(self, *exc: object) -> None:
        return None


class _Run:
    """One execution; it is the pool as well."""

    def __init__(self, choices: _Choices, raises: tuple[type[Exception], ...]) -> None:
        self.taken: set[int] = set()
        self.choices = choices
        self.raises = raises
        self.owed: set[int] = set()
        self.lost: set[int] = set()
        self.unwinding = False

    def may_raise(self) -> None:
        kind = self.choices.choose(1 + len(self.raises))
        if kind:
            self.unwinding = True
            raise self.raises[kind - 1](_BY_A_CALL)

    def acquire(self, site: int) -> _Lease | None:
        self.taken.add(site)
        self.may_raise()
        if self.choices.choose(2):
            return None
        self.owed.add(site)
        return _Lease(self, site)

    def release(self, lease: object) -> None:
        if isinstance(lease, _Lease):
            self.owed.discard(lease.site)

    def lease(self, size: int) -> _Scratch:
        self.may_raise()
        return _Scratch()

    def work(self, *borrowed: object) -> None:
        self.may_raise()

    def probe(self) -> bool:
        self.may_raise()
        return bool(self.choices.choose(2))

    def reached(self) -> None:
        self.unwinding = False

    def raising(self) -> None:
        """A bare `raise` follows: from here on the exception is the program's own."""
        error = sys.exception()
        assert error is not None
        error.args = ()


def _leases(value: object) -> set[int]:
    """The sites whose leases a value holds: what was handed over."""
    if isinstance(value, _Lease):
        return {value.site}
    if isinstance(value, SimpleNamespace):
        value = list(vars(value).values())
    if isinstance(value, list | tuple):
        return {site for item in value for site in _leases(item)}
    return set()


class _End(Enum):
    """How one run left the program."""

    NORMAL = auto()
    BY_A_CALL = auto()
    BY_A_STATEMENT = auto()


def _once(code, run: _Run) -> tuple[set[int], _End]:
    """The sites still owed at the end of one run, and which end it was."""
    scope: dict = {"reached": run.reached, "raising": run.raising}
    exec(code, scope)
    flags = [_Flag(run.choices) for _ in range(3)]
    holder, sink = SimpleNamespace(), []
    try:
        result = scope["target"](run, holder, sink, run.work, run.probe, *flags)
    except (ValueError, KeyError, RuntimeError, AssertionError) as error:
        run.unwinding = True
        end = _End.BY_A_CALL if error.args == (_BY_A_CALL,) else _End.BY_A_STATEMENT
        return run.owed - _leases([holder, sink]), end
    run.unwinding = True  # what dies from here on dies with the run
    return run.owed - _leases([result, holder, sink]), _End.NORMAL


COUNTED = {
    "none": frozenset(),
    "explicit": frozenset({_End.BY_A_STATEMENT}),
    "calls": frozenset({_End.BY_A_STATEMENT, _End.BY_A_CALL}),
}


def verdicts(program: Program, exceptions: str = "calls", limit: int = 4000) -> dict[int, Verdict]:
    """What becomes of each acquire site that some run reaches, by its number."""
    code = compile("\n".join(program.traced), "<program>", "exec")
    normal: set[int] = set()
    exceptional: set[int] = set()
    taken: set[int] = set()
    raises = _raised(program)
    choices = _Choices()
    for _ in range(limit):
        run = _Run(choices, raises)
        owed, end = _once(code, run)
        taken |= run.taken
        normal |= run.lost
        if end is _End.NORMAL:
            normal |= owed
        elif end in COUNTED[exceptions]:
            exceptional |= owed
        if not choices.advance():
            break
    else:
        raise TooManyPaths(f"more than {limit} runs")
    return {site: _verdict(site, normal, exceptional) for site in sorted(taken)}


def _raised(program: Program) -> tuple[type[Exception], ...]:
    """What a call may raise: only kinds that some handler of the program tells apart."""
    named = [kind for kind in (ValueError, KeyError) if f"except {kind.__name__}:" in program.source]
    return (RuntimeError, *named)


def _verdict(site: int, normal: set[int], exceptional: set[int]) -> Verdict:
    if site in normal:
        return Verdict.NORMAL
    return Verdict.EXCEPTIONAL if site in exceptional else Verdict.KEPT
