"""Functions that make an object of the functions within them, seen as the class that they stand for:

    def make_ring(count):                    class make_ring:
        free = deque(range(count))               def __init__(self, count):
        def take():                                  self.free = deque(range(count))
            return free.popleft()                def take(self):
        def give(slot):                              return self.free.popleft()
            free.append(slot)                    def give(self, slot):
        return Ring(take, give)                      self.free.append(slot)

`Ring` is a named tuple, a dataclass or a namespace that only names them. What calls the function makes such
an object, in the words that it has already."""

import ast
import re
from collections.abc import Iterator, Mapping

from auditor.project.code.modules import last_part
from auditor.source.nodes import every_node, statements_below

MAKING = re.compile(r"^def \w+\((?:.*\n)(?:[ \t].*\n|\n|\).*\n)*?    def (?:.*\n)(?:[ \t].*\n|\n)*?"
                    r"    return [\w.]+\(", re.MULTILINE)  # fmt: skip
NAMESPACES = frozenset({"SimpleNamespace", "Namespace", "Bunch", "Munch"})

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def write_objects(tree: ast.Module, text: str) -> None:
    """Rewrites the tree."""
    if "\n    def " not in text or MAKING.search(text) is None:
        return
    names = _fields_named(tree)
    for at, node in enumerate(tree.body):
        if isinstance(node, ast.FunctionDef) and not node.decorator_list:
            methods = _returned(node, names)
            if methods is not None:
                tree.body[at] = _Maker(node, methods).as_class()


def _fields_named(tree: ast.Module) -> dict[str, list[str]]:
    """By classes that only name fields, those names in their order."""
    found = {}
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name, body=body):
                if all(isinstance(each, ast.AnnAssign | ast.Expr | ast.Pass) for each in body):
                    found[name] = [
                        each.target.id
                        for each in body
                        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
                    ]
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=func, args=[_, fields]),
            ) if last_part(func) == "namedtuple":
                found[name] = _listed(fields)
    return found


def _listed(fields: ast.expr) -> list[str]:
    match fields:
        case ast.Constant(value=str() as text):
            return text.replace(",", " ").split()
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [str(part.value) for part in parts if isinstance(part, ast.Constant)]
    return []


def _returned(maker: ast.FunctionDef, names: Mapping[str, list[str]]) -> dict[str, str] | None:
    """By each function within it that the object has, the name it has there; two at least."""
    within = {node.name for node in maker.body if isinstance(node, FunctionNode)}
    match maker.body[-1]:
        case ast.Return(value=ast.Call(func=func, args=args, keywords=keywords)):
            made = last_part(func)
        case _:
            return None
    if len(within) < 2 or any(isinstance(node, ast.Return | ast.Yield) for node in _own(maker.body[:-1])):
        return None
    if made not in names and (made not in NAMESPACES or args):
        return None
    told = [*zip(names.get(made, ()), args, strict=False)]
    told += [(keyword.arg, keyword.value) for keyword in keywords if keyword.arg is not None]
    methods = {value.id: field for field, value in told if isinstance(value, ast.Name) and value.id in within}
    return methods if len(methods) > 1 else None


def _own(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Nodes of the statements, those of functions within them left out."""
    for statement in body:
        if not isinstance(statement, FunctionNode | ast.ClassDef):
            yield from every_node(statement)


class _Maker:
    def __init__(self, node: ast.FunctionDef, methods: Mapping[str, str]) -> None:
        self.node = node
        self.methods = methods
        self.functions = {each.name: each for each in node.body if isinstance(each, FunctionNode)}
        args = node.args
        self.told = [each.arg for each in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
        bound = {each.id for each in _own(node.body) if isinstance(each, ast.Name) and _is_bound(each)}
        self.shared = (bound | {*self.told}) & {*self._free()}

    def _free(self) -> Iterator[str]:
        """Names that functions within it read, and do not bind themselves."""
        for function in self.functions.values():
            own = _bound_within(function)
            yield from (
                each.id for each in every_node(function) if isinstance(each, ast.Name) and each.id not in own
            )

    def as_class(self) -> ast.ClassDef:
        body: list[ast.stmt] = [self._constructor()]
        body += [self._method(each) for each in self.functions.values()]
        made = ast.ClassDef(self.node.name, bases=[], keywords=[], body=body, decorator_list=[])
        return ast.copy_location(made, self.node)

    def _constructor(self) -> ast.FunctionDef:
        kept: list[ast.stmt] = [
            ast.copy_location(
                ast.Assign([_own_field(name, ast.Store(), self.node)], _name(name, self.node)), self.node
            )
            for name in self.told
            if name in self.shared
        ]
        rest = [each for each in self.node.body[:-1] if not isinstance(each, FunctionNode)]
        spelled = _AsFields(self.shared - {*self.told}, {})
        kept += [spelled.visit(each) for each in rest]
        made = ast.FunctionDef("__init__", _with_self(self.node.args), kept or [_pass(self.node)], [], None)
        return ast.copy_location(made, self.node)

    def _method(self, function: FunctionNode) -> FunctionNode:
        own = _bound_within(function)
        called = {name: self.methods.get(name, name) for name in self.functions if name not in own}
        spelled = _AsFields(self.shared - own, called)
        function.body = [
            spelled.visit(each) for each in function.body if not isinstance(each, ast.Nonlocal)
        ] or [_pass(function)]
        function.args = _with_self(function.args)
        function.name = self.methods.get(function.name, function.name)
        return function


def _is_bound(node: ast.Name) -> bool:
    return not isinstance(node.ctx, ast.Load)


def _bound_within(function: FunctionNode) -> set[str]:
    outer = {
        name for each in statements_below(function) if isinstance(each, ast.Nonlocal) for name in each.names
    }
    bound = {
        each.arg if isinstance(each, ast.arg) else each.id
        for each in every_node(function)
        if isinstance(each, ast.arg) or (isinstance(each, ast.Name) and _is_bound(each))
    }
    return bound - outer


def _name(name: str, at: ast.AST) -> ast.Name:
    made = ast.Name(name, ast.Load())
    made.lineno, made.col_offset = getattr(at, "lineno", 1), getattr(at, "col_offset", 0)
    made.end_lineno, made.end_col_offset = made.lineno, made.col_offset
    return made


def _own_field(name: str, context: ast.expr_context, at: ast.AST) -> ast.Attribute:
    own = ast.copy_location(ast.Name("self", ast.Load()), _name(name, at))
    return ast.copy_location(ast.Attribute(own, name, context), own)


def _pass(at: ast.stmt) -> ast.stmt:
    return ast.copy_location(ast.Pass(), at)


def _with_self(args: ast.arguments) -> ast.arguments:
    own = ast.arg("self")
    return ast.arguments(
        [own, *args.posonlyargs] if args.posonlyargs else [],
        args.args if args.posonlyargs else [own, *args.args],
        args.vararg,
        args.kwonlyargs,
        args.kw_defaults,
        args.kwarg,
        args.defaults,
    )


class _AsFields(ast.NodeTransformer):
    """Names of the maker become fields; its functions, called or named, become methods."""

    def __init__(self, fields: set[str], methods: Mapping[str, str]) -> None:
        self.fields = fields
        self.methods = methods

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in self.fields or (node.id in self.methods and isinstance(node.ctx, ast.Load)):
            named = self.methods.get(node.id, node.id)
            own = ast.copy_location(ast.Name("self", ast.Load()), node)
            return ast.copy_location(ast.Attribute(own, named, node.ctx), node)
        return node
