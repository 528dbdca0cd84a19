"""What is done to another part of a record says nothing of the number that lies in it.

    plan = self.plans.pop(key)
    plan.graph.reset()

The graph was told nothing of `plan.slot`, and its class, if the tree has it, never gives such numbers back.
"""

import ast
from collections.abc import Iterator, Set

from auditor.ir.ops import Path
from auditor.project.code.bindings import given_to, gone_through, is_dropped
from auditor.project.code.calls import Calls
from auditor.project.code.modules import Function
from auditor.project.outcome import Outcome
from auditor.source.nodes import walk


def asked_of_other_parts(
    calls: Calls, outcome: Outcome, method: Function, place: Path, ends: Set[str]
) -> Iterator[tuple[ast.Call, str]]:
    """Those calls of the method, and the field of the record that each asks, where the lease lies at `place`,
    `self.plans[*].slot`."""
    acquisition = outcome.acquisition
    if len(place) != 4 or acquisition.foreign or acquisition.keyed or outcome.unknown:
        return
    told = {each[3] for each in outcome.beside if each[:3] == place[:3] and len(each) > 3}
    for call in (each for each in method.calls if is_dropped(method, each)):
        match call.func:
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id=record), attr=part), attr=asked):
                known = f".{part}" not in {*told, place[3]} and asked not in ends
                if known and _lies_in(method, record, place[1][1:]) and not _ends(calls, method, call, ends):
                    yield call, f".{part}"


def _lies_in(method: Function, record: str, table: str) -> bool:
    """The name stands for what was found in the table."""
    found = (*given_to(method, record), *gone_through(method, record))
    return any(
        isinstance(node, ast.Attribute) and node.attr == table for each in found for node in walk(each)
    )


def _ends(calls: Calls, method: Function, call: ast.Call, ends: Set[str]) -> bool:
    """A class that the call may reach gives such things back."""
    classes = [each.cls for each in calls.targets(method, call)[0] if each.cls is not None]
    return any(f"{end}(" in cls.text for cls in classes for end in ends)
