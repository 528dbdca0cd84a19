"""Lists of records that somebody shortens without a look at what goes: `job.pages = job.pages[:keep]`."""

import ast
from collections.abc import Iterator, Sequence

from auditor.flow.lease import Field, Leak, Loss, StoredField
from auditor.flow.trace import span_of
from auditor.ir.ops import ANY_ITEM, RESULT
from auditor.project.code.modules import Function
from auditor.project.code.project import Project
from auditor.project.fields.cutting import cut_off
from auditor.project.fields.forgetting import for_good
from auditor.project.fields.rest_emptied import rest_emptied
from auditor.project.outcome import Outcome


def cut_on_records(outcome: Outcome, family: Sequence[Function], project: Project) -> Iterator[StoredField]:
    """Of a list in which the lease lies, and nowhere else, on an object that it is told or finds."""
    filling, acquisition = outcome.function, outcome.acquisition
    if acquisition.foreign or acquisition.keyed or acquisition.inner or outcome.unknown or not filling.cls:
        return
    places = {path for path in (*(path for _, path in outcome.stored), *outcome.beside) if path[:1] != RESULT}
    place = next(iter(places), ())
    if len(places) != 1 or place[-1] != ANY_ITEM or len(place) < 3 or not place[-2].startswith("."):
        return
    if place[0] == filling.owner and len(place) < 5:
        return
    field = place[-2][1:]
    for method in family:
        for record in sorted(_records(method, field)) if method is not filling else ():
            losing = (*cut_off(project, method, field, record), *rest_emptied(project, method, field, record))
            at = next(iter(losing), None)
            if at is not None and for_good(project, method):
                span = span_of(method.module.path, at, method.module.lines)
                where = Field(filling.cls.qualname, f"{field}[*]", record)
                yield StoredField(where, outcome.lease.span, drops=(Leak(Loss.DROPPED, span, "", ()),))
                return


def _records(method: Function, field: str) -> set[str]:
    """Names of objects whose field it is that the method speaks of."""
    return {
        node.value.id
        for node in method.nodes
        if isinstance(node, ast.Attribute) and node.attr == field and isinstance(node.value, ast.Name)
    } - {method.owner or ""}
