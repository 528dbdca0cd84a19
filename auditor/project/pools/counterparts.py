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
class Setting:
    """The states that something is set to; of a whole record, `(BUSY, owner)`, those of its `parts`."""

    way: Way
    states: Set[str]
    of_record: bool
    parts: Set[str]


@dataclass(frozen=True, slots=True)
class Traits:
    """What decides whether the changes of one method may answer those of another. Each method of a large
    class is compared with each other one, and most have nothing to do with one another.

    `last` are the last pieces of where the changes are. Of own fields: which `entries` are changed how, and
    what would undo that; which are `filled`, and which are `filled_from` those out of which something is
    taken; which are `counted` up. `settings` are the states that it sets, `asked` those for which it looks,
    if it hands out what it finds."""

    last: frozenset[str]
    entries: frozenset[tuple[str, Did]]
    entries_back: frozenset[tuple[str, Did]]
    filled: frozenset[Way]
    filled_from: frozenset[Way]
    counted: tuple[Way, ...]
    settings: tuple[Setting, ...]
    asked: Set[str]


class Moves:
    """What the methods of a class move from one field of its own into another."""

    def __init__(self, helpers: Helpers) -> None:
        self._helpers = helpers
        self._traits: dict[Function, Traits] = {}

    def may_undo(
        self, begins: Function, begun: Sequence[Change], end: Function, ended: Sequence[Change]
    ) -> bool:
        """Both have to do with what has one name, be it of another object."""
        return not self.traits(begins, begun).last.isdisjoint(self.traits(end, ended).last)

    def traits(self, method: Function, changed: Sequence[Change]) -> Traits:
        if method not in self._traits:
            entries = {(each.way[-1], each.did) for each in changed if _is_of_an_entry(each.way)}
            fields = {did: {each.way for each in changed if each.did is did and _is_a_field(each.way)}
                      for did in (Did.IN, Did.OUT, Did.MORE)}  # fmt: skip
            self._traits[method] = Traits(
                last=frozenset(change.way[-1] for change in changed),
                entries=frozenset(entries),
                entries_back=frozenset((name, OTHER_WAY[did]) for name, did in entries if did in OTHER_WAY),
                filled=frozenset(fields[Did.IN]),
                filled_from=frozenset().union(
                    *(self.into.get(way, set()) - {way} for way in fields[Did.OUT])
                ),
                counted=tuple(sorted(fields[Did.MORE])),
                settings=tuple(_settings(changed)),
                asked=compared(method) if returns_something(method) else frozenset(),
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
                if source is not None and _is_a_field(source) and change.did in (Did.IN, Did.SET):
                    found.setdefault(change.way, set()).add(source)
        return found


def _settings(changed: Sequence[Change]) -> Iterator[Setting]:
    for change in changed:
        if change.did is Did.IN and change.value is not None:
            record = change.value.elts if isinstance(change.value, ast.Tuple) else None
            parts = frozenset[str]().union(*map(states_of, record or ()))
            if (states := states_of(change.value)) or parts:
                yield Setting(change.way, states, record is not None, parts)


def _is_a_field(way: Way) -> bool:
    return len(way) == FIELD and way[0] == SELF


def _is_of_an_entry(way: Way) -> bool:
    return len(way) > FIELD and way[0] == SELF


def answers(
    begins: Function, begun: Sequence[Change], end: Function, ended: Sequence[Change], moves: Moves
) -> bool:
    """Two tables of one object have the same entries, whose field is counted up and down; a method of the
    class moves from the one list into the other; or what is counted or said belongs together."""
    first, second = moves.traits(begins, begun), moves.traits(end, ended)
    return (
        not first.entries_back.isdisjoint(second.entries)
        or not first.filled_from.isdisjoint(second.filled)
        or any(_is_reckoned_against(begins, one, other) for one in first.counted for other in second.counted)
        or any(
            _is_the_next_state(first.asked, one, end, other)
            for one in (first.settings if first.asked else ())
            for other in second.settings
        )
    )


def _is_the_next_state(asked: Set[str], one: Setting, end: Function, other: Setting) -> bool:
    """Of what the first finds in another state, and hands out."""
    same = one.way == other.way or (one.way[-1] == other.way[-1] and other.way[0] in own_parameters(end))
    if other.of_record and other.way == one.way[:-1]:
        after = other.parts
    elif same:
        after = other.states
    else:
        return False
    known = bool(one.states) and bool(after) and one.states.isdisjoint(after)
    return known and not asked <= one.states


def _is_reckoned_against(begins: Function, one: Way, other: Way) -> bool:
    """Both are counted up, and the first waits or refuses by the difference."""
    if one == other:
        return False
    begun, ended = (rf"\bself\.{way[1]}\b" for way in (one, other))
    names = "|".join([begun, *(rf"\b{name}\b" for name in _names_of(begins, one))])
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


def _leads_to(ways: Ways, value: ast.expr) -> Way | None:
    """Of what is taken out of it as well: `self.ready.append(self.cooling.popleft())`."""
    match value:
        case ast.Call(func=ast.Attribute(value=inner, attr="pop" | "popleft" | "get_nowait")):
            return ways.of(inner)
    return ways.of(value)
