"""Whether those who ask for one method ask for the other, too, of the same thing: then the two belong
together, whatever they are called. And how they tell the second of what the first gave them."""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from auditor.flow.effects import Handle, Position
from auditor.project.code.bindings import (
    TEST_FILE,
    assignments,
    given_to,
    own_attribute,
    told_by_position,
    ways,
)
from auditor.project.code.class_model import ClassModel
from auditor.project.code.modules import Class, Function, Module
from auditor.project.pools.bodies import returns_itself
from auditor.project.shapes.pool_state import own_parameters

MOST = 8
"""Other files are not asked where more than these call both."""


@dataclass(frozen=True, slots=True)
class Told:
    """The second is told what the first returned, or a `part` of that, or what the first was told `at`; and
    where."""

    handle: Handle
    end: Position
    at: Position = 0
    part: int | None = None


def used_together(model: ClassModel, begins: Function, ends: Function) -> bool:
    """`reader = self.cache.get(n)` here, `self.cache.done(reader)` there, in one class or function."""
    return any(
        _asked(scope, begins).keys() & _asked(scope, ends).keys()
        for module in _modules(model, begins, ends)
        if all(f"{half.name}(" in module.text for half in (begins, ends))
        for scope in _scopes(module)
    )


def used_by_its_own(begins: Function, ends: Function) -> bool:
    """`entry = self.acquire(key)` and, in the same method of that class, `self.done(entry)`."""
    methods = begins.cls.methods.values() if begins.cls is not None else ()
    return any(
        _told(call, [(names, begun)]) is not None
        for method in methods
        if method not in (begins, ends) and method.owner is not None
        for names, begun in _names_given(method, _of_itself(method, begins))
        for call in _of_itself(method, ends)
        if call.lineno > begun.lineno
    )


def _of_itself(method: Function, half: Function) -> list[ast.Call]:
    return [
        call
        for call in method.calling(half.name)
        if isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", None) == method.owner
    ]


def asked_in_turn(model: ClassModel, begins: Function, ends: Function, *, at_least: int = 1) -> bool:
    """Whether functions that are no tests ask for the one first and then for the other, of the same thing,
    and not as many the other way round; classes, in the order of their methods, for two that are told
    alike, `_reserve(n)` asks for the one, and `_settle(n)` for the other, or of which one is told what the
    other makes. `at_least` so many functions."""
    by_functions = [
        turn for function in _users(model, begins, ends) for turn in _turns([function], begins, ends)
    ]
    if at_least > 1:
        return sum(by_functions) >= at_least and _mostly(by_functions)
    alike = told_alike(begins, ends) or is_told_what_it_makes(begins, ends)
    return (
        _mostly(by_functions)
        or (alike and _mostly(_by_classes(model, begins, ends)))
        or passed_through(model, begins, ends)
        or kept_and_told(model, begins, ends)
    )


def kept_and_told(model: ClassModel, begins: Function, ends: Function) -> bool:
    """A class keeps what the first returns, `self.seat = self.hall.usher()`, and tells the second what it has
    kept: `self.hall.see_out(self.seat)`."""
    asking = (f"{begins.name}(", f"{ends.name}(")
    return any(
        not {*_kept(cls, begins)}.isdisjoint(_told_of_kept(cls, ends))
        for module in _modules(model, begins, ends)
        if not TEST_FILE.search(module.path)
        for cls in module.classes.values()
        if all(each in cls.text for each in asking)
    )


def _kept(cls: Class, begins: Function) -> Iterator[str]:
    """Fields, or tables, that are given it."""
    for method in cls.methods.values():
        calls = [call for _, call in _calls(method, begins)]
        names = {name for given, _ in _names_given(method, calls) for name in given} if calls else set()
        for target, value in assignments(method) if calls else ():
            value = value.value if isinstance(value, ast.Await) else value
            if _is_one_of(value, calls, names) and (field := _field(method, target)) is not None:
                yield field


def _told_of_kept(cls: Class, ends: Function) -> Iterator[str]:
    for method in cls.methods.values():
        for _, call in _calls(method, ends):
            for _, told in told_by_position(call):
                given = given_to(method, told.id) if isinstance(told, ast.Name) else (told,)
                yield from (field for each in given if (field := _field(method, each)) is not None)


def _field(method: Function, node: ast.expr) -> str | None:
    """`seats` of `self.seats[who]` and `self.seats.pop(who)`"""
    match node:
        case ast.Subscript(value=inner) | ast.Call(func=ast.Attribute(value=inner, attr="pop" | "get")):
            return own_attribute(inner, method.owner or "")
    return own_attribute(node, method.owner or "")


def passed_through(model: ClassModel, begins: Function, ends: Function) -> bool:
    """A front hands on what the first returns, and tells the second what it is told: `return
    self.bank.lend()` here, `self.bank.take_back(item)` there; or it makes an object of it, which tells what
    it has."""
    asking = (f"{begins.name}(", f"{ends.name}(")
    for module in _modules(model, begins, ends):
        if not TEST_FILE.search(module.path) and all(each in module.text for each in asking):
            functions = [each for name, each in module.functions.items() if name != "<module>"]
            fronts = {front for each in functions for front in _fronts(each, begins)}
            if any(not fronts.isdisjoint(_hands_back(each, ends)) for each in functions if fronts):
                return True
    return False


def _class_of(function: Function) -> str:
    return function.cls.name if function.cls is not None else ""


def _fronts(function: Function, begins: Function) -> Iterator[tuple[str, str]]:
    """The class that hands on what the first returns, and of whom it asks for that; or the class of the
    object which is made of it, whomever that will ask."""
    begun = list(_calls(function, begins))
    calls = [call for _, call in begun]
    names = {name for given, _ in _names_given(function, calls) for name in given} if begun else set()
    for node in function.statements if begun else ():
        for value in ways(node.value) if isinstance(node, ast.Return) and node.value is not None else ():
            if _is_one_of(value, calls, names):
                yield from ((_class_of(function), whom) for whom, _ in begun)
            match value:
                case ast.Call(func=ast.Name(id=made)) if any(
                    _is_one_of(given, calls, names) for _, given in told_by_position(value)
                ):
                    yield made, ""


def _is_one_of(value: ast.expr, calls: list[ast.Call], names: set[str]) -> bool:
    return value in calls or (isinstance(value, ast.Name) and value.id in names)


def _hands_back(function: Function, ends: Function) -> Iterator[tuple[str, str]]:
    """Its class, and whom it tells the second what it is told itself, or has."""
    told = own_parameters(function)
    for whom, call in _calls(function, ends):
        given = [each for _, each in told_by_position(call)]
        if any(isinstance(each, ast.Name) and each.id in told for each in given):
            yield _class_of(function), whom
        if any(own_attribute(each, function.owner or "") is not None for each in given):
            yield _class_of(function), ""


def told_alike(begins: Function, ends: Function) -> bool:
    """`pin(key)` and `unpin(key)`"""
    return not set(own_parameters(begins)).isdisjoint(own_parameters(ends))


def is_told_what_it_makes(begins: Function, ends: Function) -> bool:
    """`carve(size) -> Extent | None` and `restore(extent: Extent)`, of a class of the tree."""
    return _is_told(ends, _classes_named(getattr(begins.node, "returns", None)), begins.module)


def is_told_one_of_those(begins: Function, ends: Function) -> bool:
    """`shed(n) -> list[Page]` and `recycle(page: Page)`"""
    match getattr(begins.node, "returns", None):
        case ast.Subscript(value=ast.Name(id="list" | "List"), slice=inner):
            return _is_told(ends, _classes_named(inner), begins.module)
    return False


def _is_told(ends: Function, classes: set[str], module: Module) -> bool:
    made = classes & module.classes.keys()
    told = own_parameters(ends)[:1] if made else ()
    arguments = getattr(ends.node, "args", None)
    named = arguments.args if isinstance(arguments, ast.arguments) else ()
    said = {name for each in named if each.arg in told for name in _classes_named(each.annotation)}
    return not made.isdisjoint(said)


def _classes_named(annotation: ast.expr | None) -> set[str]:
    """Of a bare class, or of one that may be None; a list of them is none of them."""
    match annotation:
        case ast.Name(id=name):
            return {name}
        case ast.Attribute():
            return {ast.unparse(annotation)}  # `Permits.Permit`, a class within one
        case ast.Constant(value=str(text)) if (said := _read(text)) is not None:
            return _classes_named(said)
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return _classes_named(inner)
        case ast.BinOp(left=one, op=ast.BitOr(), right=other):
            return _classes_named(one) | _classes_named(other)
    return set()


def _read(text: str) -> ast.expr | None:
    """An annotation that is written as a text."""
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        return None


def _by_classes(model: ClassModel, begins: Function, ends: Function) -> Iterator[bool]:
    for module in _modules(model, begins, ends):
        for cls in module.classes.values():
            if all(f"{half.name}(" in cls.text for half in (begins, ends)):
                yield from _turns(list(cls.methods.values()), begins, ends)


def _mostly(turns: Iterable[bool]) -> bool:
    said = list(turns)
    return sum(said) > len(said) / 2


def told_of(model: ClassModel, begins: Function, ends: Function) -> Told | None:
    """How most of those who ask for both in one function tell the second."""
    ways = Counter(
        told
        for function in _users(model, begins, ends)
        for whom, call in _calls(function, ends)
        if (told := _told(call, _begun(function, begins, whom))) is not None
    )
    return min(ways, key=lambda told: (-ways[told], str(told)), default=None)


def _users(model: ClassModel, begins: Function, ends: Function) -> Iterator[Function]:
    for module in _modules(model, begins, ends):
        if not TEST_FILE.search(module.path):
            yield from _asking_both(module, begins.name, ends.name)


def _asking_both(module: Module, *names: str) -> Iterator[Function]:
    """Functions in whose text both are called."""
    if all(f"{name}(" in module.text for name in names):
        for scope in _scopes(module):
            yield from (each for each in scope if all(f"{name}(" in each.text for name in names))


def _turns(scope: list[Function], begins: Function, ends: Function) -> Iterator[bool]:
    """Whether they ask first for the one and at last for the other, of each whom they ask for both."""
    started, ended = (_asked(scope, each) for each in (begins, ends))
    for whom in started.keys() & ended.keys():
        first, last = min(started[whom]), max(ended[whom])
        back = min(ended[whom]) < max(started[whom])
        yield first < last and (not back or first < min(ended[whom]))


def _modules(model: ClassModel, begins: Function, ends: Function) -> Iterator[Module]:
    yield begins.module
    others = model.project.calling_both(begins.name, ends.name)
    for path in others if len(others) <= MOST else ():
        if path != begins.module.path and (module := model.project.module(path)) is not None:
            yield module


def _scopes(module: Module) -> Iterator[list[Function]]:
    """The methods of each class, each plain function."""
    for cls in module.classes.values():
        yield list(cls.methods.values())
    yield from ([function] for function in module.functions.values() if function.cls is None)


def _asked(scope: list[Function], half: Function) -> dict[str, list[int]]:
    """Of whom a method of this name is asked, and in which lines."""
    found: dict[str, list[int]] = {}
    for function in scope:
        for whom, call in _calls(function, half):
            for name in (whom, *_names_of_itself(function, half, whom)):
                found.setdefault(name, []).append(call.lineno)
    return found


def _names_of_itself(function: Function, half: Function, whom: str) -> Iterator[str]:
    """`lease` of `lease = self.loaded[name].join()`, which returns the one that it is asked of."""
    for names, _ in _begun(function, half, whom) if returns_itself(half) else ():
        yield from names


def _calls(function: Function, half: Function) -> Iterator[tuple[str, ast.Call]]:
    """The class's own methods are none of its users; of a plain function nobody is asked."""
    if half.cls is not None and function.cls is half.cls:
        return
    plain = half.cls is None or half.is_plain
    for call in function.calling(half.name):
        match call.func:
            case ast.Attribute(value=whom):
                yield "" if plain else ast.unparse(whom), call
            case ast.Name() if plain:
                yield "", call


# How it is told ---------------------------------------------------------------------------------------------


Begun = list[tuple[dict[str, int | None], ast.Call]]
"""Calls of the first half, with the names that are given what they return, or which part of it."""


def _begun(function: Function, begins: Function, whom: str) -> Begun:
    return _names_given(function, [call for asked, call in _calls(function, begins) if asked == whom])


def _names_given(function: Function, asking: Iterable[ast.Call]) -> Begun:
    calls = {id(call): call for call in asking}
    named: dict[int, dict[str, int | None]] = {at: {} for at in calls}
    for node in function.nodes if calls else ():
        match node:
            case ast.Assign(targets=[target], value=value) | ast.NamedExpr(target=target, value=value):
                value = value.value if isinstance(value, ast.Await) else value
                if id(value) in named:
                    named[id(value)].update(_parts(target))
    return [(named[at], call) for at, call in calls.items()]


def _parts(target: ast.expr) -> Iterator[tuple[str, int | None]]:
    if isinstance(target, ast.Tuple):
        yield from ((name, part) for part, each in enumerate(target.elts) if (name := _name(each)))
    elif name := _name(target):
        yield name, None


def _told(ending: ast.Call, begun: Begun) -> Told | None:
    for at, value in told_by_position(ending):
        for names, _ in begun:
            if (name := _name(value)) in names:
                return Told(Handle.RESULT, at, part=_part(value) if names[name] is None else names[name])
    for at, value in told_by_position(ending):
        for _, call in begun:
            for position, given in told_by_position(call):
                if ast.unparse(given) == ast.unparse(value) and not isinstance(value, ast.Constant):
                    return Told(Handle.ARGUMENT, at, position)
    return None


def _part(value: ast.expr) -> int | None:
    match value:
        case ast.Subscript(value=ast.Name(), slice=ast.Constant(value=int() as part)):
            return part
    return None


def _name(node: ast.expr) -> str:
    """`slot` of `slot`, `slot.index`, `slot[0]`, `slot.data_ptr()`; `req.slot` as a whole."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Subscript(value=value) | ast.Call(func=ast.Attribute(value=value), args=[]):
            return _name(value)
        case ast.Attribute(value=ast.Name(id="self")):
            return ast.unparse(node)
        case ast.Attribute(value=value):
            return _name(value)
    return ""
