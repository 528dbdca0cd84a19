"""What two ways that meet leave known together: of two facts, one for each way, at least one holds.

`x = take() if pooled else None` leaves "pooled, or x is None". A later `if x is not None:` is then a way on
which `pooled` holds, though neither fact survived the meeting by itself."""

from collections.abc import Iterable, Iterator
from functools import lru_cache

Fact = tuple[str, bool]

MARK = "|"
NONE = " is None"
PAIRS = 24
"""Ways that differ in more than this many pairs of facts leave no clauses: they have little to do with each
other, and every clause is carried along."""


def is_clause(fact: Fact) -> bool:
    return fact[0].startswith(MARK)


def clause(one: Fact, other: Fact) -> Fact:
    """Written as a fact, so that it is kept, merged and forgotten like the others."""
    return MARK + "\0".join(("+" if truth else "-") + key for key, truth in sorted((one, other))), True


@lru_cache(maxsize=1 << 16)
def literals(fact: Fact) -> tuple[Fact, Fact]:
    one, other = fact[0][1:].split("\0")
    return (one[1:], one[0] == "+"), (other[1:], other[0] == "+")


def where_ways_meet(left: frozenset[Fact], right: frozenset[Fact]) -> Iterator[Fact]:
    """Clauses that hold after the meeting; `left` and `right` are what is known on one of the ways only.

    Merging again and again ends: a clause is made only where a plain fact is lost."""
    plain = [[fact for fact in side if _telling(fact, side)] for side in (left, right)]
    if len(plain[0]) * len(plain[1]) <= PAIRS:
        yield from (clause(one, other) for one in plain[0] for other in plain[1] if one[0] != other[0])
    for side, opposite in ((left, right), (right, left)):
        yield from (fact for fact in side if is_clause(fact) and not opposite.isdisjoint(literals(fact)))


def _telling(fact: Fact, side: frozenset[Fact]) -> bool:
    """Neither a copy of another condition nor said by a shorter fact: what is true is not None."""
    key, truth = fact
    if key.startswith((MARK, "=")):
        return False
    return truth or not key.endswith(NONE) or (key.removesuffix(NONE), True) not in side


def decided(known: Iterable[Fact], learned: set[Fact]) -> set[Fact]:
    """`learned` with what follows from it: of a clause's two facts one is now false, so the other holds."""
    open_clauses = [literals(fact) for fact in known if is_clause(fact)]
    found = set(learned)
    while open_clauses:
        new = {
            kept
            for pair in open_clauses
            for (key, truth), kept in (pair, pair[::-1])
            if (key, not truth) in found and kept not in found
        }
        if not new:
            break
        found |= new
    return found
