"""Functions made beside one another, of which one acquires and another gives back, by a name that both have
from the function around them:

    def guarded(item):                          def submit_all(items):
        try:                                        for item in items:
            work(item)                                  gate.acquire()
        finally:                                        pool.submit(guarded, item)
            gate.release()
"""

import ast
from collections.abc import Set

from auditor.project.code.bindings import root_of
from auditor.project.code.modules import Function
from auditor.project.meaning.sites import last_name


def ended_by_closures(function: Function, name: str, ends: Set[str]) -> frozenset[str]:
    """Names of the functions made in this one, or around it beside it, that give back what this name stands
    for."""
    around = {function, function.parent} - {None}
    return frozenset(
        each.name
        for each in function.module.by_node.values()
        if each is not function and each.parent in around and each.name and _ends(each, name, ends)
    )


def _ends(function: Function, name: str, ends: Set[str]) -> bool:
    return any(
        last_name(call) in ends and isinstance(call.func, ast.Attribute) and root_of(call.func.value) == name
        for call in function.calls
    )
