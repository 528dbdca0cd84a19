"""Statements to operations and edges."""

import ast

from auditor.ir.cleanups import CleanupLowering
from auditor.ir.iterations import portion_of
from auditor.ir.ops import ANY_ITEM, RESULT, Capture, Constant, Fresh, Leave, Move, Store, Way
from auditor.ir.scope import defaults_of, free_names


class StatementLowering(CleanupLowering):
    """Lowers the body of one function."""

    def body(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            if not self.builder.reachable:
                return
            getattr(self, f"do_{type(statement).__name__}", self._other)(statement)

    def _other(self, node: ast.stmt) -> None:
        """Statements that neither hold nor move anything (pass, global, nonlocal, type)."""

    def do_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return
        self.value(node.value)
        self._end(node)
        if _ends_the_process(node.value):
            self.builder.ends = []  # the call's own exception is the only way on

    def do_Return(self, node: ast.Return) -> None:
        if node.value is None:
            self.builder.emit(Constant(node, RESULT, None))
        else:
            value = _as_a_choice(node.value)
            self.builder.emit(Move(node, RESULT, self.value(value), portion_of(value)))
        self._end(node)
        self.builder.leave(Leave(node, Way.RETURN))

    def do_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        names = free_names(node, self.scope.local)
        target = (self.root(node.name),)
        defaults = [(arg, self.value(value)) for arg, value in defaults_of(node)]
        self.builder.emit(Capture(node, target, node, names))
        if node.decorator_list:
            self.builder.emit(Store(node, ("@decorated", ANY_ITEM), target))  # a decorator may keep it
        for name, path in defaults:
            self.builder.emit(Store(node, (*target, f"<{name}>"), path))

    do_AsyncFunctionDef = do_FunctionDef

    def do_ClassDef(self, node: ast.ClassDef) -> None:
        self.builder.emit(Fresh(node, (self.root(node.name),)))

    def do_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            name = alias.asname or alias.name.split(".")[0]
            self.builder.emit(Fresh(node, (self.root(name),)))

    do_ImportFrom = do_Import


def _as_a_choice(value: ast.expr) -> ast.expr:
    """`True if plan.page is not None else False`: what is returned tells of the lease what an `if` would."""
    match value:
        case ast.Compare(
            left=ast.Name() | ast.Attribute(), ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(None)]
        ):
            yes, no = (ast.copy_location(ast.Constant(said), value) for said in (True, False))
            return ast.copy_location(ast.IfExp(value, yes, no), value)
    return value


ENDING = frozenset({("sys", "exit"), ("os", "_exit"), ("os", "abort")})


def _ends_the_process(node: ast.expr) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr=name)):
            return (module, name) in ENDING
    return False
