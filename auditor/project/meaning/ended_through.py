"""Whether what is noted in a field may be ended by whoever has to do with the field: names of adapters that
lie in `self.active` are no way to their counts where nobody who knows of `active` ever lowers one."""

import ast

from auditor.project.code.modules import Class, Function
from auditor.project.meaning.recognise import Recogniser
from auditor.project.meaning.sites import last_name
from auditor.source.nodes import walk


def is_ended_through(recogniser: Recogniser, field: str, protocol: str) -> bool:
    """By a method of a class that mentions the field, by a function that does, or by whoever is shown what is
    there. Where nothing is known to end such leases, anybody may."""
    names = recogniser.ending_names(protocol)
    if not names:
        return True
    asked: set[Class] = set()
    for module in recogniser.calls.model.project.parsed():
        for function in list(module.by_node.values()) if field in module.text else ():
            if function.cls in asked or field not in function.text:
                continue
            if _shows(function, field[1:]) or _ends(function, names):
                return True
            if function.cls is not None:
                asked.add(function.cls)
                if any(
                    _ends(method, names) or _shows(method, field[1:])
                    for method in function.cls.methods.values()
                ):
                    return True
    return False


def _ends(function: Function, names: frozenset[str]) -> bool:
    return any(last_name(call) in names for call in function.calls)


def _shows(function: Function, field: str) -> bool:
    """`return list(self.active)`, and not `return self.active[name]`."""
    for node in function.statements:
        if isinstance(node, ast.Return) and node.value is not None:
            parts = list(walk(node.value))
            looked_up = {id(each.value) for each in parts if isinstance(each, ast.Subscript)}
            if any(getattr(each, "attr", "") == field and id(each) not in looked_up for each in parts):
                return True
    return False
