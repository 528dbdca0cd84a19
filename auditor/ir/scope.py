"""Which names of a function are its own, its parameters, or somebody else's."""

import ast
from dataclasses import dataclass

from auditor.ir.patterns import subject_of
from auditor.source.nodes import walk

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Module


@dataclass(frozen=True, slots=True)
class Scope:
    """`outer` are names read or written here that live in a module or an enclosing function."""

    parameters: tuple[str, ...]
    local: frozenset[str]
    shared: frozenset[str]  # declared global or nonlocal: writing them outlives the call

    def root(self, name: str) -> str:
        """The root of an access path: `@name` for what does not belong to this function."""
        return name if name in self.local and name not in self.shared else "@" + name


def scope_of(function: FunctionNode) -> Scope:
    parameters = parameters_of(function)
    collector = _Bindings()
    body = function.body if isinstance(function.body, list) else [function.body]
    for statement in body:
        collector.visit(statement)
    if isinstance(function, ast.Module):
        return Scope((), frozenset(), frozenset(collector.bound))
    return Scope(parameters, frozenset(parameters) | frozenset(collector.bound), frozenset(collector.shared))


def parameters_of(function: FunctionNode) -> tuple[str, ...]:
    if isinstance(function, ast.Module):
        return ()
    args = function.args
    names = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    names += [arg.arg for arg in (args.vararg, args.kwarg) if arg is not None]
    return tuple(names)


def defaults_of(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> list[tuple[str, ast.expr]]:
    """Parameters with the values they have when nothing is passed."""
    args = function.args
    positional = [*args.posonlyargs, *args.args]
    pairs = list(zip(positional[len(positional) - len(args.defaults) :], args.defaults, strict=True))
    keyword = [(arg, value) for arg, value in zip(args.kwonlyargs, args.kw_defaults, strict=True) if value]
    return [(arg.arg, value) for arg, value in (*pairs, *keyword)]


def free_names(function: FunctionNode, enclosing: frozenset[str]) -> tuple[str, ...]:
    """Names of the enclosing function that a nested one mentions, nested deeper included."""
    own = scope_of(function)
    mentioned = {node.id for node in walk(function) if isinstance(node, ast.Name)}
    hidden = own.local - own.shared
    return tuple(sorted((mentioned & enclosing) - hidden))


class _Bindings(ast.NodeVisitor):
    """Names bound in a body, without descending into nested functions and classes."""

    def __init__(self) -> None:
        self.bound: set[str] = set()
        self.shared: set[str] = set()

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self.bound.add(node.id)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._definition(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._definition(node)

    def _definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.bound.add(node.name)
        for expression in (
            *node.decorator_list,
            *node.args.defaults,
            *(d for d in node.args.kw_defaults if d),
        ):
            self.visit(expression)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.bound.add(node.name)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        pass

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
        self.visit(node.generators[0].iter)  # the rest has a scope of its own; walruses in it are found below
        self.bound.update(inner.target.id for inner in walk(node) if isinstance(inner, ast.NamedExpr))

    visit_ListComp = _comprehension
    visit_SetComp = _comprehension
    visit_DictComp = _comprehension
    visit_GeneratorExp = _comprehension

    def visit_Global(self, node: ast.Global) -> None:
        self.shared.update(node.names)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        self.shared.update(node.names)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        self.bound.update((alias.asname or alias.name.split(".")[0]) for alias in node.names)

    visit_Import = _import
    visit_ImportFrom = _import

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name:
            self.bound.add(node.name)
        self.generic_visit(node)

    def visit_Match(self, node: ast.Match) -> None:
        self.bound.update(each.id for each in [subject_of(node)] if isinstance(each, ast.Name))
        self.generic_visit(node)

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        if node.name:
            self.bound.add(node.name)
        self.generic_visit(node)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        if node.name:
            self.bound.add(node.name)

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        if node.rest:
            self.bound.add(node.rest)
        self.generic_visit(node)
