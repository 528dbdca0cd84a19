"""Whether those who ask for one method ask for the other, too, of the same thing: then the two belong
together, whatever they are called."""

import ast
from collections.abc import Iterator

from auditor.project.code.bindings import TEST_FILE
from auditor.project.code.class_model import ClassModel
from auditor.project.code.modules import Function, Module

MOST = 8
"""Other files are not asked where more than these call both."""


def used_together(model: ClassModel, begins: Function, ends: Function) -> bool:
    """`reader = self.cache.get(n)` here, `self.cache.done(reader)` there, in one class or function."""
    names = begins.name, ends.name
    return any(
        _asked(scope, names[0], begins).keys() & _asked(scope, names[1], begins).keys()
        for module in _modules(model, begins.module, names)
        for scope in _scopes(module)
    )


def asked_in_turn(model: ClassModel, begins: Function, ends: Function) -> bool:
    """Whether functions that are no tests ask for the one first and then for the other, of the same thing,
    and not as many the other way round."""
    turns = [
        started < ended
        for module in _modules(model, begins.module, (begins.name, ends.name))
        if not TEST_FILE.search(module.path)
        for scope in _scopes(module)
        for function in scope
        for started, ended in _turns(function, begins, ends)
    ]
    return sum(turns) > len(turns) / 2


def _turns(function: Function, begins: Function, ends: Function) -> Iterator[tuple[int, int]]:
    """The lines in which a function asks first for the one and last for the other, by whom it asks."""
    started, ended = (_asked([function], each.name, begins) for each in (begins, ends))
    for whom in started.keys() & ended.keys():
        yield min(started[whom]), max(ended[whom])


def _modules(model: ClassModel, home: Module, names: tuple[str, str]) -> Iterator[Module]:
    yield home
    sources, ending = model.project.sources, f".{names[1]}("
    others = [path for path in model.project.calling(names[0]) if ending in sources[path]]
    for path in others if len(others) <= MOST else ():
        if path != home.path and (module := model.project.module(path)) is not None:
            yield module


def _scopes(module: Module) -> Iterator[list[Function]]:
    """The methods of each class, each plain function."""
    for cls in module.classes.values():
        yield list(cls.methods.values())
    yield from ([function] for function in module.functions.values() if function.cls is None)


def _asked(scope: list[Function], name: str, begins: Function) -> dict[str, list[int]]:
    """Of whom a method of this name is asked, and in which lines."""
    found: dict[str, list[int]] = {}
    for function in scope:
        for call in function.calls if function.cls is None or function.cls is not begins.cls else ():
            if isinstance(call.func, ast.Attribute) and call.func.attr == name:
                found.setdefault(ast.unparse(call.func.value), []).append(call.lineno)
    return found
