"""Classes across files: bases, methods in resolution order, what type an attribute or a local name has."""

import ast
from collections.abc import Iterator

from auditor.project.modules import Class, Function, Module, Project, dotted_name

Type = Class | str
"""A class of the project, or the dotted name of something outside it; `list[T]` is written as `("[]", T)`."""

CONTAINERS = frozenset(
    {
        "list",
        "List",
        "Sequence",
        "Iterable",
        "tuple",
        "Tuple",
        "set",
        "Set",
        "deque",
        "Iterator",
        "dict",
        "Dict",
        "Mapping",
        "defaultdict",
        "OrderedDict",
        "ModuleList",
    }
)
OPTIONAL = frozenset({"Optional", "Final", "ClassVar", "Annotated"})
DEPTH = 40
"""A type that hangs on so many others is not worth the search."""

RESULT_WRAPPERS = frozenset(
    {"Awaitable", "Coroutine", "AbstractContextManager", "AbstractAsyncContextManager"}
)


class ClassModel:
    """Types by declaration and by construction; it never runs anything and never guesses between two
    answers."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self._bases: dict[Class, list[Class]] = {}
        self._attributes: dict[Class, dict[str, Type | None]] = {}
        self._elements: dict[tuple[Class, str], Type] = {}
        self._locals: dict[Function, dict[str, Type | None]] = {}
        self._busy: set[object] = set()
        self._derived: dict[Class, list[Class]] = {}
        self._counted = -1

    # Classes ------------------------------------------------------------------------------------------------

    def bases(self, cls: Class) -> list[Class]:
        if cls not in self._bases:
            self._bases[cls] = []
            found = []
            for node in cls.node.bases:
                base = self.named(cls.module, node.value if isinstance(node, ast.Subscript) else node)
                if isinstance(base, Class) and base is not cls:
                    found.append(base)
            self._bases[cls] = found
        return self._bases[cls]

    def lineage(self, cls: Class) -> list[Class]:
        """The class and its bases, nearest first (depth first, as for code without diamonds)."""
        order: list[Class] = []
        stack = [cls]
        while stack:
            here = stack.pop()
            if here not in order:
                order.append(here)
                stack.extend(reversed(self.bases(here)))
        return order

    def subclasses(self, cls: Class) -> Iterator[Class]:
        """Among what was parsed so far."""
        modules = self.project.parsed()
        if len(modules) != self._counted:
            self._counted = len(modules)
            self._derived = {}
            for module in modules:
                for other in module.classes.values():
                    for base in self.lineage(other)[1:]:
                        self._derived.setdefault(base, []).append(other)
        yield from self._derived.get(cls, ())

    def method(self, cls: Class, name: str) -> Function | None:
        for each in self.lineage(cls):
            if name in each.methods:
                return each.methods[name]
        return None

    def super_method(self, cls: Class, name: str) -> Function | None:
        for each in self.lineage(cls)[1:]:
            if name in each.methods:
                return each.methods[name]
        return None

    # Names --------------------------------------------------------------------------------------------------

    def named(self, module: Module, node: ast.expr) -> Class | Function | Module | str | None:
        """What a name or dotted name means at module level; the dotted text where it lies outside the
        project."""
        parts = dotted_name(node)
        if parts is None:
            return None
        found = self.project.member(module, parts)
        if found is not None:
            return found
        target = module.imports.get(parts[0])
        return ".".join([target, *parts[1:]]) if target is not None else None

    def annotation(self, module: Module, node: ast.expr | None) -> tuple[Type | None, bool]:
        """The type an annotation names, and whether it is that of a container's elements."""
        if node is None:
            return None, False
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                return self.annotation(module, ast.parse(node.value, mode="eval").body)
            except (SyntaxError, ValueError):
                return None, False
        if isinstance(node, ast.BinOp):
            left = self.annotation(module, node.left)
            return left if left[0] is not None else self.annotation(module, node.right)
        if isinstance(node, ast.Subscript):
            return self._subscripted(module, node)
        found = self.named(module, node)
        return (found, False) if isinstance(found, (Class, str)) else (None, False)

    def _subscripted(self, module: Module, node: ast.Subscript) -> tuple[Type | None, bool]:
        parts = dotted_name(node.value)
        name = parts[-1] if parts else ""
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if name in OPTIONAL or name in RESULT_WRAPPERS or name in ("Type", "type"):
            return self.annotation(module, inner[0])
        if name == "Union":
            options = [self.annotation(module, option) for option in inner]
            return next((option for option in options if option[0] is not None), (None, False))
        if name in CONTAINERS:
            element, _ = self.annotation(module, inner[-1])
            return element, True
        return self.annotation(module, node.value)

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
            case ast.Subscript(value=ast.Attribute(value=value, attr=attr)):
                owner = self.type_of(function, value)
                return self.element_type(owner, attr) if isinstance(owner, Class) else None
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
        found = self.named(function.module, node)
        return found if isinstance(found, str) else None

    def _call_type(self, function: Function, node: ast.Call) -> Type | None:
        target = self.callee(function, node.func)
        if isinstance(target, Class | str):
            return target
        if isinstance(target, Function) and not isinstance(target.node, (ast.Module, ast.Lambda)):
            if target.node.returns is not None:
                return self.annotation(target.module, target.node.returns)[0]
            return self._returned_type(target)
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
        found = self.named(function.module, node)
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
        found = self.named(function.module, node)
        return None if isinstance(found, Module) else found

    # Tables -------------------------------------------------------------------------------------------------

    def attribute_type(self, cls: Class, attr: str) -> Type | None:
        for each in self.lineage(cls):
            found = self._own_attributes(each).get(attr)
            if found is not None:
                return found
            method = each.methods.get(attr)
            if method is not None and {"property", "cached_property"} & set(method.decorators):
                node = method.node
                returns = node.returns if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else None
                return self.annotation(method.module, returns)[0] or self._returned_type(method)
        return None

    def element_type(self, cls: Class, attr: str) -> Type | None:
        for each in self.lineage(cls):
            self._own_attributes(each)
            if (each, attr) in self._elements:
                return self._elements[(each, attr)]
        return None

    def _own_attributes(self, cls: Class) -> dict[str, Type | None]:
        if cls not in self._attributes:
            self._attributes[cls] = {}
            for statement in cls.node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    self._declare(cls, statement.target.id, statement.annotation)
            for method in cls.methods.values():
                self._assigned_attributes(cls, method)
        return self._attributes[cls]

    def _declare(self, cls: Class, attr: str, annotation: ast.expr) -> None:
        found, is_element = self.annotation(cls.module, annotation)
        if found is None:
            return
        if is_element:
            self._elements.setdefault((cls, attr), found)
        else:
            self._attributes[cls].setdefault(attr, found)

    def _assigned_attributes(self, cls: Class, method: Function) -> None:
        parameters = method.parameters
        if not parameters:
            return
        for node in statements_of(method.node):
            if isinstance(node, ast.AnnAssign):
                attr = _own_attribute(node.target, parameters[0])
                if attr is not None:
                    self._declare(cls, attr, node.annotation)
            elif isinstance(node, ast.Assign) and len(node.targets) == 1:
                attr = _own_attribute(node.targets[0], parameters[0])
                if attr is not None and self._attributes[cls].get(attr) is None:
                    found = self._guarded((cls, attr), method, node.value)
                    if found is not None:
                        self._attributes[cls][attr] = found

    def local_types(self, function: Function) -> dict[str, Type | None]:
        """Names of one function whose bindings agree on a type."""
        if function not in self._locals:
            types: dict[str, Type | None] = {}
            self._locals[function] = types
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
                found, is_element = self.annotation(function.module, arg.annotation)
                if found is not None and not is_element:
                    types[arg.arg] = found

    def _bind(self, function: Function, node: ast.stmt, types: dict[str, Type | None]) -> None:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found = self.type_of(function, value)
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                declared, is_element = self.annotation(function.module, annotation)
                found = None if is_element else declared
            case ast.With(items=[ast.withitem(context_expr=value, optional_vars=ast.Name(id=name))]):
                found = self.type_of(function, value)
            case ast.For(target=ast.Name(id=name), iter=ast.Attribute(value=value, attr=attr)):
                owner = self.type_of(function, value)
                found = self.element_type(owner, attr) if isinstance(owner, Class) else None
            case _:
                return
        if name in types and types[name] is not found:
            if found is not None:
                types[name] = None if types[name] is not None else found
        else:
            types[name] = found


def statements_of(function: ast.AST) -> Iterator[ast.stmt]:
    """All statements of a function, those of nested functions and classes left out."""
    body = getattr(function, "body", [])
    stack = list(reversed(body)) if isinstance(body, list) else []
    while stack:
        node = stack.pop()
        if not isinstance(node, ast.stmt):
            continue
        yield node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        for name in ("finalbody", "orelse", "body"):
            stack.extend(reversed(getattr(node, name, [])))
        for handler in getattr(node, "handlers", ()):
            stack.extend(reversed(handler.body))
        for case in getattr(node, "cases", ()):
            stack.extend(reversed(case.body))


def _own_attribute(target: ast.expr, owner: str) -> str | None:
    if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == owner:
        return target.attr
    return None
