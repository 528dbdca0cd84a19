"""Types of names: what fields are declared and assigned as, what the bindings of a local agree on."""

import ast
from collections.abc import Iterator

from auditor.project.code import annotations
from auditor.project.code.annotations import Type, Written, named, type_named
from auditor.project.code.bindings import (
    entries_put,
    given_to_field,
    names_bound,
    own_attribute,
)
from auditor.project.code.lineage import Lineage
from auditor.project.code.modules import Class, Function
from auditor.project.code.project import Project
from auditor.source.nodes import walk

Binder = ast.stmt | ast.arg | ast.comprehension
"""What binds names."""

DEPTH = 40
"""A type that hangs on so many others is not worth the search."""


class BoundTypes(Lineage):
    """Tables by class and by function, filled when asked for; types of expressions are the subclass's."""

    def __init__(self, project: Project) -> None:
        super().__init__(project)
        self._attributes: dict[Class, dict[str, Type | None]] = {}
        self._declared: dict[Class, dict[str, Written]] = {}
        self._locals: dict[Function, dict[str, Type | None]] = {}
        self._written: dict[Function, dict[str, Written]] = {}
        self._unasked: dict[Function, dict[str, list[Binder]]] = {}
        self._asking: list[str] = []
        self._busy: set[object] = set()

    def type_of(self, function: Function, node: ast.expr) -> Type | None:
        """The type of an expression."""
        raise TypeError("expressions have types in ClassModel")  # pragma: no cover - overridden there

    def written(self, function: Function, node: ast.expr) -> Written | None:
        """The annotation that says what an expression is, elements included."""
        raise TypeError("expressions have types in ClassModel")  # pragma: no cover - overridden there

    def _guarded(self, key: object, function: Function, node: ast.expr) -> Type | None:
        if key in self._busy or len(self._busy) >= DEPTH:
            return None
        self._busy.add(key)
        try:
            return self.type_of(function, node)
        finally:
            self._busy.discard(key)

    def _promised(self, target: Function) -> Written | None:
        """What a call gives by the annotation; a context manager's is that of what it yields."""
        returns = getattr(target.node, "returns", None)
        if returns is None:
            return None
        promised = target.module, returns
        return annotations.element(promised) if target.is_context_manager else promised

    def _returned_type(self, target: Function) -> Type | None:
        """Of a short accessor without annotation: `return self.pool`, `return Pool()`."""
        body = target.body
        if not isinstance(body, list) or len(body) > 6:
            return None
        for statement in body:
            if isinstance(statement, ast.Return) and statement.value is not None:
                return self._guarded(("returns", target), target, statement.value)
        return None

    def attribute_type(self, cls: Class, attr: str) -> Type | None:
        for each in self.lineage(cls):
            found = self._own_attributes(each).get(attr)
            if found is not None:
                return found
            method = each.methods.get(attr)
            if method is not None and method.is_property:
                return (
                    type_named(self.project, self._promised(method))
                    or self._returned_type(method)
                    or self._field_shown(cls, each, method)
                )
        return None

    def _field_shown(self, cls: Class, base: Class, shown: Function) -> Type | None:
        """`return self._stock` in a base, where the class itself says what `_stock` is."""
        body = shown.body
        last = body[-1] if isinstance(body, list) else None
        if cls is base or not isinstance(last, ast.Return) or last.value is None:
            return None
        attr = own_attribute(last.value, shown.owner or "")
        return self.attribute_type(cls, attr) if attr and attr != shown.name else None

    def _own_attributes(self, cls: Class) -> dict[str, Type | None]:
        if cls not in self._attributes:
            self._attributes[cls] = {}
            self._declared[cls] = {}
            for statement in cls.node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    self._declare(cls, statement.target.id, statement.annotation)
                elif isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
                    self._shared_attribute(cls, statement)
            for method in cls.methods.values():
                self._assigned_attributes(cls, method)
            self._declare_by_entries(cls)
        return self._attributes[cls]

    def _declare_by_entries(self, cls: Class) -> None:
        """`self.gates[name] = Semaphore(4)`: of a field that says nothing of it, what is put there, where all
        that is put there is of one type."""
        put: dict[str, list[tuple[Function, ast.expr, bool]]] = {}
        for method in cls.methods.values():
            for attr, value, keyed in entries_put(method):
                put.setdefault(attr, []).append((method, value, keyed))
        for attr, entries in put.items():
            if attr not in self._declared[cls]:
                types = {self._guarded((cls, attr, id(value)), method, value) for method, value, _ in entries}
                listed = not all(keyed for _, _, keyed in entries) or _is_list(cls, attr)
                around = "list[{}]" if listed else "dict[str, {}]"
                written = self._around(cls, types.pop(), entries[0][1], around) if len(types) == 1 else None
                if written is not None:
                    self._declared[cls][attr] = written

    def _around(self, cls: Class, entry: Type | None, made: ast.expr, around: str) -> Written | None:
        """A table of such entries, as an annotation: a class by its name where it stands, anything else by
        what makes it here."""
        if isinstance(entry, Class) and entry.module.classes.get(entry.name) is entry:
            name, module = entry.name, entry.module
        elif isinstance(entry, str) and isinstance(made, ast.Call):
            name, module = ast.unparse(made.func), cls.module
        else:
            return None
        return module, ast.parse(around.format(name), mode="eval").body

    def _shared_attribute(self, cls: Class, made: ast.Assign) -> None:
        """`stock = Pool(16)` in the body of the class."""
        for target in made.targets:
            if isinstance(target, ast.Name):
                whole = cls.module.functions["<module>"]
                self._attributes[cls][target.id] = self._guarded((cls, target.id), whole, made.value)

    def _declare(self, cls: Class, attr: str, annotation: ast.expr) -> None:
        written = cls.module, annotation
        self._declared[cls].setdefault(attr, written)
        found = type_named(self.project, written)
        if found is not None:
            self._attributes[cls].setdefault(attr, found)

    def _assigned_attributes(self, cls: Class, method: Function) -> None:
        parameters = method.parameters
        if not parameters:
            return
        for node in method.statements:
            if isinstance(node, ast.AnnAssign):
                attr = own_attribute(node.target, parameters[0])
                if attr is not None:
                    self._declare(cls, attr, node.annotation)
            elif isinstance(node, ast.Assign) and len(node.targets) == 1:
                for target, value in _pairwise(node.targets[0], node.value):
                    self._assigned_attribute(cls, method, target, value)

    def _assigned_attribute(self, cls: Class, method: Function, target: ast.expr, value: ast.expr) -> None:
        attr = own_attribute(target, method.parameters[0])
        if attr is not None and isinstance(value, (ast.Name, ast.ListComp, ast.DictComp, ast.List, ast.Dict)):
            written = self.written(method, value)
            if written is not None:
                self._declared[cls].setdefault(attr, written)
        if attr is not None and self._attributes[cls].get(attr) is None:
            found = self._guarded((cls, attr), method, value)
            if found is not None:
                self._attributes[cls][attr] = found

    def local_types(self, function: Function, name: str) -> dict[str, Type | None]:
        """Types of names of one function, where all bindings agree; that of `name` is among them if bound.

        Only what is asked for is looked up: each type may lead to another file."""
        types = self._locals.setdefault(function, {})
        self._written.setdefault(function, {})
        if function not in self._unasked:
            self._unasked[function] = _binding(function)
        if len(self._asking) >= DEPTH:
            return types
        self._asking.append(name)
        try:
            for node in self._unasked[function].pop(name, ()):
                self._bind(function, node, types)
        finally:
            self._asking.pop()
        return types

    def _write(
        self, function: Function, name: str, written: Written | None, types: dict[str, Type | None]
    ) -> None:
        """An annotated name, or one whose value's annotation is known."""
        if written is None:
            return
        self._written[function].setdefault(name, written)
        found = type_named(self.project, written)
        if found is not None:
            self._agree(name, found, types)

    def _agree(self, name: str, found: Type | None, types: dict[str, Type | None]) -> None:
        if name in types and types[name] != found:
            if found is not None:
                types[name] = None if types[name] is not None else found
        else:
            types[name] = found

    def _bind(self, function: Function, node: Binder, types: dict[str, Type | None]) -> None:
        match node:
            case ast.arg(arg=name) if name == function.owner:
                types[name] = function.cls
            case ast.arg(arg=name, annotation=ast.expr() as annotation):
                self._write(function, name, (function.module, annotation), types)
            case ast.arg(arg=name) if function.name == "__init__" and function.cls is not None:
                given = self._given_by_makers(function, function.cls, name)
                if given is not None:
                    self._agree(name, given, types)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self._agree(name, self.type_of(function, value), types)
                self._write(function, name, self.written(function, value), {})
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                self._write(function, name, (function.module, annotation), types)
            case ast.With(items=[ast.withitem(context_expr=value, optional_vars=ast.Name(id=name))]):
                self._agree(name, self.type_of(function, value), types)
            case (
                ast.For(target=target, iter=value)
                | ast.AsyncFor(target=target, iter=value)
                | ast.comprehension(target=target, iter=value)
            ):
                for part, over in _zipped(target, value):
                    element = annotations.element(self._iterated(function, over))
                    self._bind_element(function, part, element, types)
            case ast.Assign(targets=[ast.Tuple() as target], value=value):
                self._bind_element(function, target, self.written(function, value), types)
            case ast.Assert(test=ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name(id=name), said])):
                found = named(self.project, function.module, said)
                if isinstance(found, Class):
                    types[name] = found

    def _given_by_makers(self, init: Function, cls: Class, name: str) -> Type | None:
        """`Handle(self, index)` in a method of the pool: what the calls agree on that make such an object in
        its file, or in those beside it."""
        index = init.parameters.index(name) - 1 if name in init.parameters else len(init.parameters)
        types: set[Type] = set()
        for maker, call in self._makers(cls):
            given = call.args[index] if 0 <= index < len(call.args) else None
            given = next((keyword.value for keyword in call.keywords if keyword.arg == name), given)
            found = self._guarded(("made", id(call), name), maker, given) if given is not None else None
            types |= {found} if isinstance(found, Class) else set()
        return types.pop() if len(types) == 1 else None

    def _makers(self, cls: Class) -> Iterator[tuple[Function, ast.Call]]:
        yield from cls.module.makers(cls.name)
        for module in self.project.beside(cls.module, f"{cls.name}("):
            if named(self.project, module, ast.Name(cls.name, ast.Load())) is cls:
                yield from module.makers(cls.name)

    def _iterated(self, function: Function, value: ast.expr) -> Written | None:
        match value:
            case ast.Call(func=ast.Name(id="enumerate"), args=[inner, *_]):
                element = annotations.element(self._iterated(function, inner))
                if element is None:
                    return None
                pair = ast.Subscript(ast.Name("tuple"), ast.Tuple([ast.Name("int"), element[1]]))
                return element[0], ast.Subscript(ast.Name("list"), pair)
        return self.written(function, value)

    def _bind_element(
        self, function: Function, target: ast.expr, written: Written | None, types: dict[str, Type | None]
    ) -> None:
        if isinstance(target, ast.Name):
            self._write(function, target.id, written, types)
        elif isinstance(target, ast.Tuple):
            for index, each in enumerate(target.elts):
                self._bind_element(function, each, annotations.part(written, index), types)


def _is_list(cls: Class, attr: str) -> bool:
    """`self.slots = [None] * count`, in which places are filled by their numbers."""
    given = (value for method in cls.methods.values() for value in given_to_field(method, attr))
    return any(
        isinstance(value, ast.List | ast.ListComp)
        or (isinstance(value, ast.BinOp) and isinstance(value.left, ast.List))
        for value in given
    )


def _zipped(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """`for slot, batch in zip(slots, batches)` goes over each of them."""
    match target, value:
        case ast.Tuple(elts=parts), ast.Call(func=ast.Name(id="zip"), args=lists) if len(parts) == len(lists):
            return list(zip(parts, lists, strict=True))
    return [(target, value)]


def _pairwise(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """`self.pool, self.index = pool, index` assigns one to one."""
    match target, value:
        case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
            return list(zip(targets, values, strict=True))
    return [(target, value)]


def _binding(function: Function) -> dict[str, list[Binder]]:
    """What binds each name of a function, in source order."""
    found: dict[str, list[Binder]] = {}
    if isinstance(function.node, ast.Module):
        return found
    args = function.node.args
    for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs):
        found.setdefault(arg.arg, []).append(arg)
    for node in function.statements:
        for name in names_bound(node):
            found.setdefault(name, []).append(node)
    for inner in function.nodes:
        if isinstance(inner, ast.comprehension):
            for each in walk(inner.target):
                if isinstance(each, ast.Name):
                    found.setdefault(each.id, []).append(inner)
    return found
