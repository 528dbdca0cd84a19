"""Types by declaration and by construction: what an expression is, what a call means.

It never runs anything and never guesses between two answers."""

import ast

from auditor.project import annotations
from auditor.project.annotations import Type, Written, named, type_named
from auditor.project.bindings import own_attribute, statements_of
from auditor.project.lineage import Lineage
from auditor.project.modules import Class, Function, Module, Project

DEPTH = 40
"""A type that hangs on so many others is not worth the search."""

SAME_ELEMENTS = frozenset({"list", "tuple", "sorted", "reversed", "iter", "set", "cast", "copy"})


class ClassModel(Lineage):
    def __init__(self, project: Project) -> None:
        super().__init__(project)
        self._attributes: dict[Class, dict[str, Type | None]] = {}
        self._declared: dict[Class, dict[str, Written]] = {}
        self._locals: dict[Function, dict[str, Type | None]] = {}
        self._written: dict[Function, dict[str, Written]] = {}
        self._busy: set[object] = set()

    # Types of expressions -----------------------------------------------------------------------------------

    def type_of(self, function: Function, node: ast.expr) -> Type | None:
        match node:
            case ast.Name(id=name):
                return self._name_type(function, name)
            case ast.Attribute(value=value, attr=attr):
                return self._attribute_type(function, node, value, attr)
            case ast.Call():
                return self._call_type(function, node)
            case ast.Await(value=value) | ast.NamedExpr(value=value):
                return self.type_of(function, value)
            case ast.Subscript():
                return type_named(self.project, self.written(function, node))
            case ast.BoolOp(values=values):
                types = {self.type_of(function, value) for value in values} - {None}
                return types.pop() if len(types) == 1 else None
            case ast.IfExp(body=body, orelse=orelse):
                return self.type_of(function, body) or self.type_of(function, orelse)
        return None

    def _name_type(self, function: Function, name: str) -> Type | None:
        scope: Function | None = function
        while scope is not None:
            local = self.local_types(scope)
            if name in local:
                return local[name]
            scope = scope.parent
        value = function.module.assigned.get(name)
        if value is not None:
            return self._guarded(
                ("global", function.module.path, name), function.module.functions["<module>"], value
            )
        return None

    def _guarded(self, key: object, function: Function, node: ast.expr) -> Type | None:
        if key in self._busy or len(self._busy) >= DEPTH:
            return None
        self._busy.add(key)
        try:
            return self.type_of(function, node)
        finally:
            self._busy.discard(key)

    def _attribute_type(self, function: Function, node: ast.expr, value: ast.expr, attr: str) -> Type | None:
        owner = self.type_of(function, value)
        if isinstance(owner, Class):
            return self.attribute_type(owner, attr)
        if isinstance(owner, str):
            return None
        found = named(self.project, function.module, node)
        return found if isinstance(found, str) else None

    def _call_type(self, function: Function, node: ast.Call) -> Type | None:
        target = self.callee(function, node.func)
        if isinstance(target, Class | str):
            return target
        if isinstance(target, Function) and not isinstance(target.node, (ast.Module, ast.Lambda)):
            if target.node.returns is not None:
                return type_named(self.project, self._promised(target))
            return self._returned_type(target)
        return type_named(self.project, self.written(function, node)) if target is None else None

    def _promised(self, target: Function) -> Written | None:
        """What a call gives by the annotation; a context manager's is that of what it yields."""
        returns = getattr(target.node, "returns", None)
        if returns is None:
            return None
        promised = target.module, returns
        return annotations.element(promised) if target.is_context_manager else promised

    def written(self, function: Function, node: ast.expr) -> Written | None:
        """The annotation that says what an expression is, elements included."""
        match node:
            case ast.Name(id=name):
                return self._local_annotation(function, name)
            case ast.Attribute(value=value, attr=attr):
                owner = self.type_of(function, value)
                return self._field_annotation(owner, attr) if isinstance(owner, Class) else None
            case ast.Subscript(value=value, slice=ast.Slice()) | ast.Await(value=value):
                return self.written(function, value)
            case ast.Subscript(value=value):
                return annotations.item(self.written(function, value))
            case ast.Call(func=ast.Name(id=name), args=[*_, last]) if name in SAME_ELEMENTS:
                return self.written(function, last)
            case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in annotations.VIEWS:
                return annotations.view(self.written(function, value), attr)
            case ast.Call(func=func):
                target = self.callee(function, func)
                return self._promised(target) if isinstance(target, Function) else None
        return None

    def _local_annotation(self, function: Function, name: str) -> Written | None:
        scope: Function | None = function
        while scope is not None:
            self.local_types(scope)
            if name in self._written[scope]:
                return self._written[scope][name]
            scope = scope.parent
        return None

    def _field_annotation(self, cls: Class, attr: str) -> Written | None:
        for each in self.lineage(cls):
            self._own_attributes(each)
            if attr in self._declared[each]:
                return self._declared[each][attr]
            method = each.methods.get(attr)
            if method is not None and {"property", "cached_property"} & set(method.decorators):
                return self._promised(method)
        return None

    def _returned_type(self, target: Function) -> Type | None:
        """Of a short accessor without annotation: `return self.pool`, `return Pool()`."""
        body = getattr(target.node, "body", [])
        if not isinstance(body, list) or len(body) > 6:
            return None
        for statement in body:
            if isinstance(statement, ast.Return) and statement.value is not None:
                return self._guarded(("returns", target), target, statement.value)
        return None

    def callee(self, function: Function, node: ast.expr) -> Class | Function | str | None:
        """What `node(...)` calls: a function, a class, or something outside by its dotted name."""
        if isinstance(node, ast.Name):
            return self._called_name(function, node)
        if not isinstance(node, ast.Attribute):
            return None
        if (
            isinstance(node.value, ast.Call)
            and getattr(node.value.func, "id", "") == "super"
            and function.cls
        ):
            return self.super_method(function.cls, node.attr)
        owner = self.type_of(function, node.value)
        if isinstance(owner, Class):
            return self._bound(owner, node.attr)
        if isinstance(owner, str):
            return f"{owner}.{node.attr}"
        found = named(self.project, function.module, node)
        if isinstance(found, Module):
            return None
        return found

    def _bound(self, owner: Class, name: str) -> Class | Function | str | None:
        method = self.method(owner, name)
        if method is not None:
            return method
        held = self.attribute_type(owner, name)
        if isinstance(held, Class):
            return self.method(held, "forward") or self.method(held, "__call__")
        return None

    def _called_name(self, function: Function, node: ast.Name) -> Class | Function | str | None:
        scope: Function | None = function
        while scope is not None:
            if node.id in scope.nested:
                return scope.nested[node.id]
            local = self.local_types(scope).get(node.id)
            if isinstance(local, Class) and scope.qualname != "<module>":
                return self.method(local, "forward") or self.method(local, "__call__")
            scope = scope.parent
        found = named(self.project, function.module, node)
        return None if isinstance(found, Module) else found

    # Tables -------------------------------------------------------------------------------------------------

    def attribute_type(self, cls: Class, attr: str) -> Type | None:
        for each in self.lineage(cls):
            found = self._own_attributes(each).get(attr)
            if found is not None:
                return found
            method = each.methods.get(attr)
            if method is not None and {"property", "cached_property"} & set(method.decorators):
                return type_named(self.project, self._promised(method)) or self._returned_type(method)
        return None

    def _own_attributes(self, cls: Class) -> dict[str, Type | None]:
        if cls not in self._attributes:
            self._attributes[cls] = {}
            self._declared[cls] = {}
            for statement in cls.node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    self._declare(cls, statement.target.id, statement.annotation)
            for method in cls.methods.values():
                self._assigned_attributes(cls, method)
        return self._attributes[cls]

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
        for node in statements_of(method.node):
            if isinstance(node, ast.AnnAssign):
                attr = own_attribute(node.target, parameters[0])
                if attr is not None:
                    self._declare(cls, attr, node.annotation)
            elif isinstance(node, ast.Assign) and len(node.targets) == 1:
                attr = own_attribute(node.targets[0], parameters[0])
                if attr is not None and self._attributes[cls].get(attr) is None:
                    found = self._guarded((cls, attr), method, node.value)
                    if found is not None:
                        self._attributes[cls][attr] = found

    def local_types(self, function: Function) -> dict[str, Type | None]:
        """Names of one function whose bindings agree on a type."""
        if function not in self._locals:
            types: dict[str, Type | None] = {}
            self._locals[function] = types
            self._written[function] = {}
            self._parameter_types(function, types)
            if function.qualname != "<module>":
                for node in statements_of(function.node):
                    self._bind(function, node, types)
        return self._locals[function]

    def _parameter_types(self, function: Function, types: dict[str, Type | None]) -> None:
        if isinstance(function.node, (ast.Module, ast.Lambda)):
            return
        args = function.node.args
        for index, arg in enumerate((*args.posonlyargs, *args.args, *args.kwonlyargs)):
            if index == 0 and function.is_method and not function.is_static:
                types[arg.arg] = function.cls
            elif arg.annotation is not None:
                self._write(function, arg.arg, (function.module, arg.annotation), types)

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
        if name in types and types[name] is not found:
            if found is not None:
                types[name] = None if types[name] is not None else found
        else:
            types[name] = found

    def _bind(self, function: Function, node: ast.stmt, types: dict[str, Type | None]) -> None:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self._agree(name, self.type_of(function, value), types)
                self._write(function, name, self.written(function, value), {})
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                self._write(function, name, (function.module, annotation), types)
            case ast.With(items=[ast.withitem(context_expr=value, optional_vars=ast.Name(id=name))]):
                self._agree(name, self.type_of(function, value), types)
            case ast.For(target=target, iter=value) | ast.AsyncFor(target=target, iter=value):
                self._bind_element(
                    function, target, annotations.element(self._iterated(function, value)), types
                )
            case ast.Assign(targets=[ast.Tuple() as target], value=value):
                self._bind_element(function, target, self.written(function, value), types)
            case ast.Assert(test=ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name(id=name), said])):
                found = named(self.project, function.module, said)
                if isinstance(found, Class):
                    types[name] = found

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
