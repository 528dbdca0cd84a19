"""What undoes what was done, though it does something to another field, or says another word there.

frame = self._victim(); frame.pins += 1        # of self.frames
frame = self.where[page]; frame.pins -= 1      # the same frames, by their pages

job["status"] = CLAIMED                        # of one that was PENDING
job["status"] = DONE

number = self.issued; self.issued += 1         # waits while number >= self.served + self.desks
self.served += 1

return self.ready.pop()
self.cooling.append(event)                     # whence self.ready is filled again
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from auditor.project.code.bindings import given_to, own_attribute
from auditor.project.code.modules import Function
from auditor.project.pools.bodies import returns_something
from auditor.project.shapes.changes import OTHER_WAY, Change, Did, changes
from auditor.project.shapes.pool_state import own_parameters
from auditor.project.shapes.states import compared, states_of
from auditor.project.shapes.ways import SELF, Helpers, Way, Ways

FIELD = 2
"""So long is the way to a field of the object itself."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What decides at a glance whether the changes of one method may answer those of another: the last pieces
    of where they are, those and the pieces before, whether something is counted up, where something is put,
    and out of what that is filled out of which something is taken."""

    last: frozenset[str]
    near: frozenset[str]
    counts: bool
    put: frozenset[Way]
    sources: frozenset[Way]


class Moves:
    """What the methods of a class move from one field of its own into another."""

    def __init__(self, helpers: Helpers) -> None:
        self._helpers = helpers
        self._traits: dict[Function, Traits] = {}

    def may_answer(
        self, begins: Function, begun: Sequence[Change], end: Function, ended: Sequence[Change]
    ) -> bool:
        """Most methods of a large class have nothing to do with one another, and each is asked about all."""
        first, second = self._of(begins, begun), self._of(end, ended)
        return (
            not first.near.isdisjoint(second.last)
            or (first.counts and second.counts)
            or not first.sources.isdisjoint(second.put)
        )

    def _of(self, method: Function, changed: Sequence[Change]) -> Traits:
        if method not in self._traits:
            taken = {change.way for change in changed if change.did is Did.OUT}
            self._traits[method] = Traits(
                last=frozenset(change.way[-1] for change in changed),
                near=frozenset(piece for change in changed for piece in change.way[-2:]),
                counts=any(change.did is Did.MORE for change in changed),
                put=frozenset(change.way for change in changed if change.did is Did.IN),
                sources=frozenset().union(*(self.into.get(way, ()) for way in taken)),
            )
        return self._traits[method]

    @cached_property
    def into(self) -> Mapping[Way, Set[Way]]:
        """By the field that is filled, those out of which it is."""
        found: dict[Way, set[Way]] = {}
        for method in self._helpers.values():
            ways = Ways(method, self._helpers)
            for change in changes(method, ways) if method.name != "__init__" else ():
                source = _leads_to(ways, change.value) if change.value is not None else None
                own = source is not None and len(source) == FIELD and source[0] == SELF
                if own and source is not None and change.did in (Did.IN, Did.SET):
                    found.setdefault(change.way, set()).add(source)
        return found


def answers(
    begins: Function, begun: Sequence[Change], end: Function, ended: Sequence[Change], moves: Moves
) -> bool:
    return moves.may_answer(begins, begun, end, ended) and any(
        _of_the_same_entries(one, other)
        or _is_the_next_state(begins, one, end, other)
        or _is_reckoned_against(begins, one, other)
        or _comes_round(one, other, moves)
        for one in begun
        for other in ended
    )


def _of_the_same_entries(one: Change, other: Change) -> bool:
    """Two tables of one object have the same entries, whose field is counted up and down."""
    entries = one.way[0] == other.way[0] == SELF and min(len(one.way), len(other.way)) > FIELD
    return entries and one.way[-1] == other.way[-1] and OTHER_WAY.get(one.did) is other.did


def _is_the_next_state(begins: Function, one: Change, end: Function, other: Change) -> bool:
    """Of what the first finds in another state, and hands out."""
    if one.did is not Did.IN or other.did is not Did.IN or one.value is None or other.value is None:
        return False
    same = one.way == other.way or (one.way[-1] == other.way[-1] and other.way[0] in own_parameters(end))
    if isinstance(other.value, ast.Tuple) and other.way == one.way[:-1]:  # the whole record at once
        said = other.value.elts
    elif same:
        said = [other.value]
    else:
        return False
    taken, after = states_of(one.value), frozenset[str]().union(*map(states_of, said))
    known = bool(taken) and bool(after) and taken.isdisjoint(after)
    return known and returns_something(begins) and not compared(begins) <= taken


def _is_reckoned_against(begins: Function, one: Change, other: Change) -> bool:
    """Both are counted up, and the first waits or refuses by the difference."""
    own = len(one.way) == len(other.way) == FIELD and one.way[0] == other.way[0] == SELF
    if not own or one.way == other.way or not one.did is other.did is Did.MORE:
        return False
    begun, ended = (rf"\bself\.{way[1]}\b" for way in (one.way, other.way))
    names = "|".join([begun, *(rf"\b{name}\b" for name in _names_of(begins, one.way))])
    return any(
        re.search(rf"(?:{first})[^\n]*?(?: [<>]=? | - )[^\n]*?(?:{second})", begins.text)
        for first, second in ((names, ended), (ended, names))
    )


def _names_of(begins: Function, way: Way) -> Iterator[str]:
    """`number` of `number = self.issued`"""
    local = (node.id for node in begins.nodes if isinstance(node, ast.Name))
    for name in sorted(set(local)):
        given = list(given_to(begins, name))
        if given and all(own_attribute(each, begins.owner or "") == way[1] for each in given):
            yield name


def _comes_round(one: Change, other: Change, moves: Moves) -> bool:
    """A method of the class moves from the one list into the other."""
    if one.did is not Did.OUT or other.did is not Did.IN or one.way == other.way:
        return False
    own = len(one.way) == len(other.way) == FIELD and one.way[0] == other.way[0] == SELF
    return own and other.way in moves.into.get(one.way, ())


def _leads_to(ways: Ways, value: ast.expr) -> Way | None:
    """Of what is taken out of it as well: `self.ready.append(self.cooling.popleft())`."""
    match value:
        case ast.Call(func=ast.Attribute(value=inner, attr="pop" | "popleft" | "get_nowait")):
            return ways.of(inner)
    return ways.of(value)
