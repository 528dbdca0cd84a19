"""Methods that take an entry out of a container of leases and return it: `batch = feed.get()`, of a queue
into which another method puts what it has taken. Whoever calls one has it from then on."""

import ast
from collections.abc import Iterator

from auditor.flow.effects import Handle
from auditor.flow.follow import Followed
from auditor.ir.ops import ANY_ITEM, RESULT, Path
from auditor.project.code.field_paths import own_field
from auditor.project.code.modules import Function
from auditor.project.fields.families import Families
from auditor.project.fields.forgetting import INITIAL
from auditor.project.fields.record_places import record_place
from auditor.project.fields.ways_out import WayOut
from auditor.project.meaning.source import Source
from auditor.project.outcome import Outcome, has_gone_to_the_caller

DEEPEST = 4
"""So many containers one after the other are looked through."""


def handed_on(asked: Families, outcome: Outcome) -> Iterator[tuple[Function, Source]]:
    """With what their callers get."""
    cls, acquisition = outcome.function.cls, outcome.acquisition
    if cls is None or acquisition.foreign or acquisition.keyed or acquisition.opened:
        return
    family = list(asked.family_of(cls))
    first = _containers(outcome, family)
    for containers in _one_after_the_other(asked, outcome, family, first) if first else ():
        for method, rest in _returning(asked, outcome, family, containers):
            yield (
                method,
                Source(
                    acquisition.protocol,
                    "discovered",
                    Handle.RESULT,
                    acquisition.value,
                    rest=rest,
                    fresh=True,
                    second_hand=True,
                ),
            )


Containers = frozenset[tuple[str, Path]]


def _returning(
    asked: Families, outcome: Outcome, family: list[Function], containers: Containers
) -> Iterator[tuple[Function, Path]]:
    for method in family:
        if method is outcome.function or not _may_hand_on(method):
            continue
        followed = _followed(asked, outcome, method, containers)
        found = {*_returned(method, *followed)} if followed is not None else set()
        if len(found) == 1:
            yield method, found.pop()


def _one_after_the_other(
    asked: Families, outcome: Outcome, family: list[Function], first: Containers
) -> Iterator[Containers]:
    """`first`, and those into which a method moves what it takes out of them."""
    seen, waiting = {first}, [first]
    while waiting:
        containers = waiting.pop()
        yield containers
        for method in family if len(seen) <= DEEPEST else ():
            followed = _followed(asked, outcome, method, containers)
            moved = frozenset(_moved(method, *followed)) - containers if followed is not None else None
            if moved and moved not in seen:
                seen.add(moved)
                waiting.append(moved)


def _followed(
    asked: Families, outcome: Outcome, method: Function, containers: Containers
) -> tuple[Followed, tuple[Path, ...]] | None:
    if method.owner is None or all(f".{table}" not in method.text for table, _ in containers):
        return None
    places = tuple((method.owner, f".{table}", ANY_ITEM, *rest) for table, rest in sorted(containers))
    followed = asked.followed_all(method, places, outcome.acquisition)
    return (followed, places) if followed is not None else None


def _moved(method: Function, followed: Followed, places: tuple[Path, ...]) -> Iterator[tuple[str, Path]]:
    """Where it lies on ways on which it is out of its first container."""
    for node, path in (*followed.endings.stored.items(), *sorted(followed.endings.beside)):
        if (
            path[:1] == (method.owner,)
            and path[2:3] == (ANY_ITEM,)
            and path[:3] not in {p[:3] for p in places}
        ):
            held = followed.solution.states.get(node, ())
            if any(WayOut(method, followed, node, each, places[0][:2]).taken is not None for each in held):
                yield path[1][1:], path[3:]


def _containers(outcome: Outcome, family: list[Function]) -> Containers:
    """Tables of the own object that it lies in, and where in their entries; nobody else has it."""
    paths = {path for _, path in outcome.stored} | set(outcome.beside)
    if has_gone_to_the_caller(outcome) or not paths:
        return frozenset()
    direct = [path for path in paths if own_field(outcome.function, path) and path[2:3] == (ANY_ITEM,)]
    if len(direct) == len(paths):
        return frozenset((path[1][1:], path[3:]) for path in direct)
    place = record_place(outcome.function, paths, family)
    sure = place is not None and place.sure
    return frozenset((table, place.field) for table in place.tables) if place and sure else frozenset()


def _may_hand_on(method: Function) -> bool:
    special = method.name.startswith("__") or method.name in INITIAL
    return not (special or method.owner is None or method.is_abstract or method.is_context_manager)


def _returned(method: Function, followed: Followed, places: tuple[Path, ...]) -> Iterator[Path]:
    """Where in the result it lies, on ways on which the entry is out of its container."""
    beside = [
        (node, path[1:]) for node, path in sorted(followed.endings.beside) if path[:1] == RESULT
    ]  # `req.state = DONE; return req`, which was known by a name of its own before
    for node, path in (*followed.endings.returned.items(), *beside):
        for held in followed.solution.states[node]:
            way = WayOut(method, followed, node, held, places[0][:2])
            if way.taken is not None and _takes_out(way.taken):
                yield path


def _takes_out(taken: ast.AST) -> bool:
    """`self.jobs.get(key)` looks it up."""
    looks_up = isinstance(taken, ast.Call) and getattr(taken.func, "attr", "") == "get" and taken.args
    return not looks_up
