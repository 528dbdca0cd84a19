"""Methods that take an entry out of a container of leases and return it: `batch = feed.get()`, of a queue into
which another method puts what it has taken. Whoever calls one has it from then on."""

import ast
from collections.abc import Iterator

from auditor.flow.effects import Handle
from auditor.flow.follow import Followed
from auditor.ir.ops import ANY_ITEM, Path
from auditor.project.code.field_paths import own_field
from auditor.project.code.modules import Function
from auditor.project.fields.families import Families
from auditor.project.fields.forgetting import INITIAL
from auditor.project.fields.record_places import record_place
from auditor.project.fields.ways_out import WayOut
from auditor.project.meaning.source import Source
from auditor.project.outcome import Outcome, has_gone_to_the_caller


def handed_on(asked: Families, outcome: Outcome) -> Iterator[tuple[Function, Source]]:
    """With what their callers get."""
    cls, acquisition = outcome.function.cls, outcome.acquisition
    if cls is None or acquisition.foreign or acquisition.keyed or acquisition.opened:
        return
    family = list(asked.family_of(cls))
    containers = _containers(outcome, family)
    for method in family if containers else ():
        if method is outcome.function or not _may_hand_on(method):
            continue
        if all(f".{table}" not in method.text for table, _ in containers):
            continue
        places = tuple((method.parameters[0], f".{table}", ANY_ITEM, *rest) for table, rest in containers)
        followed = asked.followed_all(method, places, acquisition)
        found = {*_returned(method, followed, places)} if followed is not None else set()
        if len(found) == 1:
            yield (
                method,
                Source(
                    acquisition.protocol,
                    "discovered",
                    Handle.RESULT,
                    acquisition.value,
                    rest=found.pop(),
                    fresh=True,
                    second_hand=True,
                ),
            )


def _containers(outcome: Outcome, family: list[Function]) -> list[tuple[str, Path]]:
    """Tables of the own object that it lies in, and where in their entries; nobody else has it."""
    paths = {path for _, path in outcome.stored} | set(outcome.beside)
    if has_gone_to_the_caller(outcome) or not paths:
        return []
    direct = [path for path in paths if own_field(outcome.function, path) and path[2:3] == (ANY_ITEM,)]
    if len(direct) == len(paths):
        return sorted({(path[1][1:], path[3:]) for path in direct})
    place = record_place(outcome.function, paths, family)
    return [(table, place.field) for table in sorted(place.tables)] if place and place.sure else []


def _may_hand_on(method: Function) -> bool:
    special = method.name.startswith("__") or method.name in INITIAL
    return not (special or method.owner is None or method.is_abstract or method.is_context_manager)


def _returned(method: Function, followed: Followed, places: tuple[Path, ...]) -> Iterator[Path]:
    """Where in the result it lies, on ways on which the entry is out of its container."""
    for node, path in followed.endings.returned.items():
        for held in followed.solution.states[node]:
            way = WayOut(method, followed, node, held, places[0][:2])
            if way.taken is not None and _takes_out(way.taken):
                yield path


def _takes_out(taken: ast.AST) -> bool:
    """`self.jobs.get(key)` looks it up."""
    looks_up = isinstance(taken, ast.Call) and getattr(taken.func, "attr", "") == "get" and taken.args
    return not looks_up
