"""The pool a generated program runs against: it chooses what raises or gives None, and keeps the books."""

import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class Choices:
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


BY_A_CALL = "raised by a call"
BY_A_RELEASE = "raised by a release"


class Lease:
    __slots__ = ("run", "site")

    def __init__(self, run: "Run", site: int) -> None:
        self.run = run
        self.site = site

    def __del__(self) -> None:
        if self.site in self.run.owed and not self.run.unwinding:
            self.run.lost.add(self.site)


def leases_in(value: object) -> set[int]:
    """The sites whose leases a value holds: what was handed over."""
    if isinstance(value, Lease):
        return {value.site}
    if isinstance(value, SimpleNamespace):
        value = list(vars(value).values())
    if isinstance(value, list | tuple):
        return {site for item in value for site in leases_in(item)}
    return set()


class Flag:
    """A truth value that is decided when it is first asked for, and kept."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.value: int | None = None

    def __bool__(self) -> bool:
        if self.value is None:
            self.value = self.choices.choose(2)
        return bool(self.value)


class Scratch:
    """What `pool.lease` gives: a context manager that owes nobody anything."""

    def __enter__(self) -> object:
        return object()

    def __exit__(self, *exc: object) -> None:
        return None


class Run:
    """One execution; it is the pool as well."""

    def __init__(self, choices: Choices, raises: tuple[type[Exception], ...]) -> None:
        self.choices = choices
        self.raises = raises
        self.taken: set[int] = set()
        self.owed: set[int] = set()
        self.lost: set[int] = set()
        self.unwinding = False
        self.call_failed = False
        self.doubtful: set[int] = set()  # owed while a release failed
        self.returning: set[int] = set()  # given to a `return`, which a `finally` may overrule

    def may_raise(self, why: str = BY_A_CALL) -> None:
        kind = self.choices.choose(1 + len(self.raises))
        if not kind:
            return
        self.unwinding = True
        if why is BY_A_CALL:
            self.call_failed = True
        else:
            self.doubtful |= self.owed
        raise self.raises[kind - 1](why)

    def acquire(self, site: int) -> Lease | None:
        self.taken.add(site)
        self.may_raise()
        if self.choices.choose(2):
            return None
        self.owed.add(site)
        return Lease(self, site)

    def release(self, lease: object) -> None:
        if isinstance(lease, Lease):
            self.owed.discard(lease.site)
        self.may_raise(BY_A_RELEASE)

    def lease(self, size: int) -> Scratch:
        self.may_raise()
        return Scratch()

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
        self.unwinding = True

    def returned(self, value: T) -> T:
        self.returning |= leases_in(value)
        return value

    def unwind(self, error: type[Exception] | None = None) -> type[Exception] | None:
        """What the program itself raises: a value that a `return` had ready may die on the way."""
        self.unwinding = True
        return error
