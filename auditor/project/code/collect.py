"""Reads one syntax tree: its functions, classes, imports and assigned names."""

import ast
from collections.abc import Iterable, Iterator

from auditor.project.code.closure_objects import write_objects
from auditor.project.code.default_factories import write_constructors
from auditor.project.code.in_threads import write_threads
from auditor.project.code.kept_as_told import class_by_call
from auditor.project.code.method_aliases import write_aliases
from auditor.project.code.modules import Class, Function, Module
from auditor.project.code.plain_statements import write_plainly
from auditor.project.code.spelled_out import spell_out
from auditor.source.nodes import HOLDERS, blocks_of


def read_module(path: str, text: str, tree: ast.Module) -> Module:
    write_objects(tree, text)
    write_plainly(tree, text)
    written = [*write_constructors(tree, text), *write_aliases(tree, text), *spell_out(tree, text)]
    written += write_threads(tree, text)
    module = Module(path, text, tree, written=written)
    body = Function(module, "<module>", tree)
    module.functions["<module>"] = body
    module.by_node[id(tree)] = body
    _Collector(module).statements(tree.body, "", None, None)
    return module


class _Collector:
    """Finds definitions and imports, statement by statement; expressions are only searched for lambdas."""

    def __init__(self, module: Module) -> None:
        self.module = module

    def statements(
        self, body: Iterable[ast.stmt], prefix: str, cls: Class | None, parent: Function | None
    ) -> None:
        for node in body:
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    self._function(node, prefix, cls, parent)
                case ast.ClassDef():
                    self._class(node, prefix)
                case ast.Import() | ast.ImportFrom():
                    names = imported_names(node, self.module.package)
                    everything = names.pop("*", None)
                    self.module.imports.update(names)
                    if everything is not None:
                        self.module.stars.append(everything.removesuffix(".*"))
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Lambda() as value):
                    self._lambda(name, value, prefix, cls, parent)
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if parent is None and cls is None:
                    made = class_by_call(name, value)
                    if made is not None:
                        self._class(made, prefix)
                    else:
                        self.module.assigned.setdefault(name, value)
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value) if (
                    parent is None and cls is None
                ):
                    self.module.assigned.setdefault(name, value)
                case _ if type(node) in HOLDERS:  # most statements hold no others
                    for block in blocks_of(node):
                        self.statements(block, prefix, cls, parent)

    def _function(
        self,
        node: ast.FunctionDef | ast.AsyncFunctionDef,
        prefix: str,
        cls: Class | None,
        parent: Function | None,
    ) -> None:
        qualname = prefix + node.name
        function = Function(self.module, qualname, node, cls, parent)
        self.module.by_node[id(node)] = function
        self.module.functions.setdefault(qualname, function)
        if parent is not None:
            parent.nested.setdefault(node.name, function)
        elif cls is not None:
            if node.name in cls.methods and "setter" in function.decorators:
                cls.methods[node.name + "="] = function
            else:
                cls.methods[node.name] = function
        self.statements(node.body, qualname + ".", cls, function)
        for parameter, default in _defaults(node.args):
            if isinstance(default, ast.Lambda):
                self._lambda(parameter, default, qualname + ".", cls, function)

    def _lambda(
        self, name: str, node: ast.Lambda, prefix: str, cls: Class | None, parent: Function | None
    ) -> None:
        """`take = lambda: ...` is a function called take."""
        function = Function(self.module, prefix + name, node, cls if parent is not None else None, parent)
        self.module.by_node[id(node)] = function
        if parent is not None:
            parent.nested.setdefault(name, function)
        elif cls is None:
            self.module.functions.setdefault(function.qualname, function)

    def _class(self, node: ast.ClassDef, prefix: str) -> None:
        cls = Class(self.module, prefix + node.name, node)
        self.module.classes.setdefault(cls.qualname, cls)
        self.statements(node.body, cls.qualname + ".", cls, None)


def _defaults(args: ast.arguments) -> Iterator[tuple[str, ast.expr | None]]:
    positional = [*args.posonlyargs, *args.args]
    for arg, default in zip(reversed(positional), reversed(args.defaults), strict=False):
        yield arg.arg, default
    for arg, keyword_default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield arg.arg, keyword_default


def imported_names(node: ast.Import | ast.ImportFrom, package: list[str]) -> dict[str, str]:
    """Local name to dotted name; relative imports become absolute from the file's own folders."""
    if isinstance(node, ast.Import):
        return {
            alias.asname or alias.name.split(".")[0]: alias.name if alias.asname else alias.name.split(".")[0]
            for alias in node.names
        }
    base = node.module or ""
    if node.level:
        above = package[: len(package) - node.level + 1]
        base = ".".join([*above, base] if base else above)
    within = f"{base}." if base else ""  # `from . import pools` where the sources begin
    return {alias.asname or alias.name: within + alias.name for alias in node.names}
