"""Whether a function hands on what the first of two methods was asked of, and who gets it asks for the
second:

    def checkout(self, name):            adapter = self.store.checkout(name)
        return self.table[name].retain()     ...
                                         adapter.drop()

Then the two belong together, though nobody asks both of one name.
"""

import ast
from collections.abc import Iterator

from auditor.project.code.class_model import ClassModel
from auditor.project.code.modules import Function, Module
from auditor.project.pools.used_together import MOST


def ended_by_who_gets_it(model: ClassModel, begins: Function, ends: Function) -> bool:
    makers = {
        function.name
        for module in _modules(model, begins.module, model.project.calling(begins.name))
        for function in module.functions.values()
        if function.cls is not begins.cls and _hands_on(function, begins)
    }
    return any(
        not {*_got(function, maker)}.isdisjoint(_ended(function, ends))
        for maker in sorted(makers)
        for module in _modules(model, begins.module, model.project.calling_both(maker, ends.name))
        for function in module.functions.values()
        if function.cls is not ends.cls
    )


def _modules(model: ClassModel, own: Module, paths: list[str]) -> Iterator[Module]:
    yield own
    for path in paths if len(paths) <= MOST else ():
        if path != own.path and (module := model.project.module(path)) is not None:
            yield module


def _hands_on(function: Function, begins: Function) -> bool:
    """`return adapter.retain()`, or `adapter.retain()` and then `return adapter`."""
    calls = function.calling(begins.name)
    asked = {ast.unparse(call.func.value) for call in calls if isinstance(call.func, ast.Attribute)}
    answers = [node.value for node in function.statements if isinstance(node, ast.Return) and calls]
    return any(value is not None and (value in calls or ast.unparse(value) in asked) for value in answers)


def _got(function: Function, maker: str) -> Iterator[str]:
    """Names of what the maker answers with."""
    calls = function.calling(maker)
    for node in function.nodes if calls else ():
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.NamedExpr(target=ast.Name(id=name), value=value)
            ) if (value.value if isinstance(value, ast.Await) else value) in calls:
                yield name


def _ended(function: Function, ends: Function) -> Iterator[str]:
    for call in function.calling(ends.name):
        match call.func:
            case ast.Attribute(value=ast.Name(id=name)):
                yield name
