"""Whether those who ask for one method ask for the other, too, of the same thing: then the two belong
together, whatever they are called."""

import ast
from collections.abc import Iterator

from auditor.project.code.class_model import ClassModel
from auditor.project.code.modules import Function, Module

MOST = 8
"""Other files are not asked where more than these call both."""


def used_together(model: ClassModel, begins: Function, ends: Function) -> bool:
    """`reader = self.cache.get(n)` here, `self.cache.done(reader)` there, in one class or function."""
    names = begins.name, ends.name
    return any(
        not _asked(scope, names[0], begins).isdisjoint(_asked(scope, names[1], begins))
        for module in _modules(model, begins.module, names)
        for scope in _scopes(module)
    )


def _modules(model: ClassModel, home: Module, names: tuple[str, str]) -> Iterator[Module]:
    calls = [f".{name}(" for name in names]
    yield home
    sources = model.project.sources
    others = [path for path in sorted(sources) if all(call in sources[path] for call in calls)]
    for path in others if len(others) <= MOST else ():
        if path != home.path and (module := model.project.module(path)) is not None:
            yield module


def _scopes(module: Module) -> Iterator[list[Function]]:
    """The methods of each class, each plain function."""
    for cls in module.classes.values():
        yield list(cls.methods.values())
    yield from ([function] for function in module.functions.values() if function.cls is None)


def _asked(scope: list[Function], name: str, begins: Function) -> set[str]:
    """Of whom a method of this name is asked."""
    return {
        ast.unparse(call.func.value)
        for function in scope
        if function.cls is None or function.cls is not begins.cls
        for call in function.calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == name
    }
