"""Leases that plain functions keep in what their module has, followed as if the module were an object:

    _sessions: dict[str, Slot] = {}

    def start(user):
        _sessions[user] = SLOTS.claim()

    def forget(user):
        _sessions.pop(user, None)

What is asked of fields can be asked of `_sessions` then. What nothing ever ends the process may keep for its
life: only what ends there and is not given back is told."""

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

from auditor.flow.lease import StoredField
from auditor.project.code.bindings import assigned_by
from auditor.project.code.class_state import methods_of_class
from auditor.project.code.modules import Class, Function, Module
from auditor.project.code.project import Project
from auditor.project.code.shared_state import OBJECT, Shared, is_store, name_of, sharing
from auditor.project.code.told_object import methods_of_object, told_the_same
from auditor.project.meaning.recognise import Recogniser
from auditor.project.outcome import Outcome

Follow = Callable[[Function, ast.Call], Outcome | None]
Found = Mapping[int, tuple[StoredField, ...]]


def as_methods(outcomes: Iterable[Outcome], recogniser: Recogniser, follow: Follow) -> dict[int, Outcome]:
    """For each outcome (by id of its call) of a function that shares with others what they work on, that of
    the same call in a method."""
    found: dict[int, Outcome] = {}
    seen = _SeenAsMethods(recogniser)
    for outcome in outcomes:
        for method in seen.of(outcome.function):
            call = next((each for each in method.calls if _is_same(each, outcome.call)), None)
            if call is not None and (kept := follow(method, call)) is not None and kept.stored:
                found[id(outcome.call)] = kept
                break
    return found


def told_as_functions(found: Found, methods: Mapping[int, Outcome]) -> dict[int, tuple[StoredField, ...]]:
    """What was found of the methods, by the calls of the functions."""
    told = {}
    for call, outcome in methods.items():
        root = _root(outcome.function)
        fields = (each for each in found.get(id(outcome.call), ()) if each.drops or each.overwrite)
        told[call] = tuple(_under(each, root) for each in fields)
    return {call: fields for call, fields in told.items() if fields}


def _root(method: Function) -> str:
    """How the function itself calls what it shares: the object that it is told, its class, or not at all."""
    if not method.is_plain and method.cls is not None:
        return method.cls.name
    return method.owner if method.owner is not None and method.owner != OBJECT else ""


def _under(stored: StoredField, root: str) -> StoredField:
    over = stored.overwrite
    if over is not None:
        name = over.holder.partition(".")[2] or over.holder
        over = replace(over, holder=f"{root}.{name}" if root else name)
    return replace(stored, field=replace(stored.field, root=root), overwrite=over)


class _SeenAsMethods:
    """Asks each module, class and function once."""

    def __init__(self, recogniser: Recogniser) -> None:
        self.recogniser = recogniser
        self.of_modules: dict[str, list[Shared]] = {}
        self.of_others: dict[Function | Class, list[Shared]] = {}

    def of(self, function: Function) -> Iterator[Function]:
        """What it is as a method, by what it shares with others."""
        for shared in self._sharing(function):
            if function in shared.methods:
                yield shared.methods[function]

    def _sharing(self, function: Function) -> list[Shared]:
        module, around = function.module, function.cls if function.parent is None else function.parent
        if around is None:
            if module.path not in self.of_modules:
                self.of_modules[module.path] = self._known(_of_module(module, self.recogniser))
            return self.of_modules[module.path]
        if around not in self.of_others:
            found = methods_of_class(around) if isinstance(around, Class) else _of_closure(around)
            self.of_others[around] = self._known([found] if found is not None else [])
        return self.of_others[around]

    def _known(self, found: Iterable[Shared]) -> list[Shared]:
        """Those that hand on what a pool lends do so as methods."""
        kept = list(found)
        known = self.recogniser.wrappers
        for function, method in (each for shared in kept for each in shared.methods.items()):
            if function in known:
                known[method] = known[function]
        return kept


def _of_module(module: Module, recogniser: Recogniser) -> Iterator[Shared]:
    """The functions that share some store of the module, and those that are told the same object."""
    plain = [each for each in module.functions.values() if each.cls is None and each.parent is None]
    plain = [each for each in plain if not isinstance(each.node, ast.Module | ast.Lambda)]
    halves = {*recogniser.acquiring, *recogniser.releasing}
    project = recogniser.calls.model.project
    kept = {name for name in _stores(module, plain) if _is_their_own(name, module, plain, halves)}
    kept = {name for name in kept if not _is_imported(name, module, project)}
    sharers = _sharers(plain, kept) if kept else []
    if len(sharers) > 1:
        yield sharing(module, name_of(module), module.tree.body, sharers, kept)
    for said, functions in told_the_same(module, plain):
        if halves.isdisjoint(functions):
            yield methods_of_object(module, said, functions)


def _of_closure(around: Function) -> Shared | None:
    """The functions that another one makes, which share its own names."""
    inner = list(around.nested.values())
    if isinstance(around.node, ast.Module | ast.Lambda):
        return None
    kept = {
        target.id
        for statement in around.node.body
        for target, value in assigned_by(statement)
        if isinstance(target, ast.Name) and is_store(value)
    }
    sharers = _sharers(inner, kept) if kept else []
    return sharing(around.module, around.name, around.node.body, sharers, kept) if len(sharers) > 1 else None


def _stores(module: Module, plain: Sequence[Function]) -> Iterator[str]:
    """Containers that the module makes, and names that functions say to be the module's."""
    said = {name for each in plain for node in each.of_kind(ast.Global) for name in node.names}
    for name, value in module.assigned.items():
        if name in said or (is_store(value) and not isinstance(value, ast.Constant)):
            yield name


def _is_their_own(name: str, module: Module, plain: Sequence[Function], halves: Set[Function]) -> bool:
    """No class of the module gets at it. What a pool of functions has is the pool's."""
    word = re.compile(rf"\b{re.escape(name)}\b")
    users = [each for each in plain if word.search(each.text)]
    others = (each.text for each in module.classes.values())
    return len(users) > 1 and halves.isdisjoint(users) and not any(word.search(text) for text in others)


def _is_imported(name: str, module: Module, project: Project) -> bool:
    """`from quay import BERTHS`: somebody else may see to what lies there."""
    dotted = f"{name_of(module)}.{name}"
    return any(
        each == dotted or each.endswith(f".{dotted}")
        for other in project.parsed()
        if other is not module and name in other.text
        for each in other.imports.values()
    )


def _sharers(plain: Sequence[Function], kept: Set[str]) -> list[Function]:
    """Those that work with it, and those that call them."""
    names = set(kept)
    while more := {each.name for each in plain if _mentions(each, names)} - names:
        names |= more
    return [each for each in plain if each.name in names]


def _mentions(function: Function, names: Set[str]) -> bool:
    return any(node.id in names for node in function.of_kind(ast.Name))


def _is_same(call: ast.Call, other: ast.Call) -> bool:
    return (call.lineno, call.col_offset, call.end_lineno, call.end_col_offset) == (
        other.lineno,
        other.col_offset,
        other.end_lineno,
        other.end_col_offset,
    )
