"""Types by declaration and by construction: what an expression is, what a call means.

It never runs anything and never guesses between two answers."""

import ast
import re

from auditor.project.code import annotations
from auditor.project.code.annotations import Type, Written, named, type_named
from auditor.project.code.bound_types import BoundTypes
from auditor.project.code.given_functions import Given, given_in
from auditor.project.code.modules import Class, Function, Module
from auditor.project.code.project import Project, dotted_name

SAME_ELEMENTS = frozenset({"list", "tuple", "sorted", "reversed", "iter", "set", "cast", "copy"})

PATH = "pathlib.Path"
"""What `/` and `with_suffix()` make more of."""

OUT_OF_A_CONTAINER = re.compile(
    r"(?:collections\.(?:deque|OrderedDict|defaultdict)|(?:queue|asyncio|multiprocessing)\.\w*Queue)"
    r"\.(?:pop|popleft|popitem|get|get_nowait|setdefault)"
)
"""Of `lease = self.waiting.popleft()` nothing is known but what others say of it."""


class ClassModel(BoundTypes):
    def __init__(self, project: Project) -> None:
        super().__init__(project)
        self.factories: dict[Function, tuple[Function, ...]] = {}  # those that make pools of functions
        self._given_in: dict[Function, dict[str, Given]] = {}

    def type_of(self, function: Function, node: ast.expr) -> Type | None:
        match node:
            case ast.Name(id=name):
                return self._name_type(function, name)
            case ast.Attribute(value=value, attr=attr):
                return self._attribute_type(function, node, value, attr)
            case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(attr)), *_]):
                return self._attribute_type(function, ast.Attribute(value, attr), value, attr)
            case ast.Call():
                return self._call_type(function, node)
            case ast.Await(value=value) | ast.NamedExpr(value=value):
                return self.type_of(function, value)
            case ast.Subscript():
                return type_named(self.project, self.written(function, node))
            case ast.BoolOp(values=values):
                types = {self.type_of(function, value) for value in values} - {None}
                return types.pop() if len(types) == 1 else None
            case ast.BinOp(op=ast.Div(), left=left):
                return PATH if self.type_of(function, left) == PATH else None
            case ast.IfExp(body=body, orelse=orelse):
                return self.type_of(function, body) or self.type_of(function, orelse)
        return None

    def _name_type(self, function: Function, name: str) -> Type | None:
        scope: Function | None = function
        while scope is not None:
            local = self.local_types(scope, name)
            if name in local:
                return local[name]
            scope = scope.parent
        value = function.module.assigned.get(name)
        if value is not None:
            return self._guarded(
                ("global", function.module.path, name), function.module.functions["<module>"], value
            )
        return self._imported_type(function.module, [name])

    def _imported_type(self, module: Module, parts: list[str]) -> Type | None:
        """Of an object that another module makes: a pool that all share."""
        found = self.project.variable(module, parts)
        if found is None:
            return None
        home, name = found
        key = ("global", home.path, name)
        made = self._guarded(key, home.functions["<module>"], home.assigned[name])
        return made if isinstance(made, Class) else None

    def _attribute_type(self, function: Function, node: ast.expr, value: ast.expr, attr: str) -> Type | None:
        owner = self.type_of(function, value)
        if isinstance(owner, Class):
            return self.attribute_type(owner, attr)
        if isinstance(owner, str):
            return None
        found = named(self.project, function.module, node)
        if isinstance(found, str):
            return self._imported_type(function.module, dotted_name(node) or []) or found
        return self._shared_type(function.module, value, attr) if found is None else None

    def _shared_type(self, module: Module, value: ast.expr, attr: str) -> Type | None:
        """Of `Shared.stock`, which all objects of the class have in common."""
        owner = named(self.project, module, value)
        return self.attribute_type(owner, attr) if isinstance(owner, Class) else None

    def _call_type(self, function: Function, node: ast.Call) -> Type | None:
        target = self.callee(function, node.func)
        if isinstance(target, str) and target.startswith(f"{PATH}.with_"):
            return PATH
        if isinstance(target, str) and OUT_OF_A_CONTAINER.fullmatch(target):
            return None
        if isinstance(target, Class | str):
            return target
        if isinstance(target, Function) and not isinstance(target.node, (ast.Module, ast.Lambda)):
            if target.node.returns is not None:
                return type_named(self.project, self._promised(target))
            return self._returned_type(target)
        return type_named(self.project, self.written(function, node)) if target is None else None

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
            case ast.ListComp(elt=ast.Name(id=name), generators=[gone_over]):
                return self._written_of_each(function, name, gone_over, "list[{}]")
            case ast.DictComp(value=ast.Name(id=name), generators=[gone_over]):
                return self._written_of_each(function, name, gone_over, "dict[str, {}]")
            case ast.ListComp(elt=made) | ast.List(elts=[made, *_]):
                return self._written_around(function, made, "list[{}]")
            case ast.DictComp(value=made) | ast.Dict(values=[made, *_]):
                return self._written_around(function, made, "dict[str, {}]")
        return None

    def _written_of_each(
        self, function: Function, name: str, gone_over: ast.comprehension, container: str
    ) -> Written | None:
        """`{shard.name: shard for shard in shards}` holds what `shards` does."""
        if getattr(gone_over.target, "id", None) != name:
            return None
        each = annotations.element(self.written(function, gone_over.iter))
        if each is None:
            return None
        return each[0], ast.parse(container.format(ast.unparse(each[1])), mode="eval").body

    def _written_around(self, function: Function, made: ast.expr, container: str) -> Written | None:
        """`[Pool(size) for size in sizes]` is a list of these pools, `[self.send(x) for x in xs]` one of what
        that returns."""
        found = self.type_of(function, made) if isinstance(made, ast.Call) else None
        if not isinstance(found, Class) or found.module.classes.get(found.name) is not found:
            return None
        return found.module, ast.parse(container.format(found.name), mode="eval").body

    def _local_annotation(self, function: Function, name: str) -> Written | None:
        scope: Function | None = function
        while scope is not None:
            self.local_types(scope, name)
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
            if method is not None and method.is_property:
                return self._promised(method)
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
        for each in owner.methods.values() if self.factories else ():
            if (given := self._given(each, f".{name}")) is not None:
                return given
        held = self.attribute_type(owner, name)
        if isinstance(held, Class):
            return self.method(held, "forward") or self.method(held, "__call__")
        return None

    def _called_name(self, function: Function, node: ast.Name) -> Class | Function | str | None:
        scope: Function | None = function
        while scope is not None:
            if "classmethod" in scope.decorators and scope.parameters[:1] == (node.id,):
                return scope.cls  # `cls(...)`, though the object may be of a class derived from it
            if node.id in scope.nested:
                return scope.nested[node.id]
            local = self.local_types(scope, node.id).get(node.id)
            if isinstance(local, Class) and scope.qualname != "<module>":
                return self.method(local, "forward") or self.method(local, "__call__")
            if self.factories and (given := self._given(scope, node.id)) is not None:
                return given
            scope = scope.parent
        whole = function.module.functions["<module>"]
        if self.factories and (given := self._given(whole, node.id)) is not None:
            return given
        found = named(self.project, function.module, node)
        return None if isinstance(found, Module) else found

    def _given(self, scope: Function, name: str) -> Function | None:
        """`take` of `take, give = make_pool(8)`."""
        if scope not in self._given_in:
            self._given_in[scope] = given_in(scope)
        if name not in self._given_in[scope]:
            return None
        func, index, number = self._given_in[scope][name]
        factory = named(self.project, scope.module, func)
        handed = self.factories.get(factory, ()) if isinstance(factory, Function) else ()
        return handed[index] if len(handed) == number else None
