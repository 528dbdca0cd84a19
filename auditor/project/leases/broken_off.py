"""Turns of a loop that are broken off: `if block is None: credits.give(); break` undoes what the turn
counted, and whoever gets what the other turns send counts down for them."""

import ast
from collections.abc import Set

from auditor.flow.effects import Acquisition
from auditor.project.code.calls import Calls
from auditor.project.code.modules import Function
from auditor.project.meaning.sites import last_name
from auditor.source.nodes import walk


def broken_off_at(calls: Calls, function: Function, acquired: Acquisition, ends: Set[str]) -> set[int]:
    """Calls that undo so; none where nobody else counts down without having counted up himself."""
    found = {
        id(each)
        for node in function.statements
        if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Break)
        for undoing in node.body
        for each in walk(undoing)
        if isinstance(each, ast.Call) and last_name(each) in ends
    }
    taking = acquired.text.rpartition(".")[2]
    return found if found and _ended_by_others(calls, function, taking, ends) else set()


def _ended_by_others(calls: Calls, function: Function, taking: str, ends: Set[str]) -> bool:
    """Some other function ends one that it has not taken."""
    for module in calls.model.project.parsed():
        if not any(f".{end}(" in module.text for end in ends):
            continue
        for other in module.by_node.values():
            called = {last_name(call) for call in other.calls}
            if other is not function and called & ends and taking not in called and other.name not in ends:
                return True
    return False
