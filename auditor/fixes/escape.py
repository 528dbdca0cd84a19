"""Whether something of a lease may live on when its block is left: then an earlier release is not safe."""

import ast
from collections.abc import Sequence

from auditor.fixes.life import SCOPES, mentions, statements_in
from auditor.flow.effects import BORROWED, Value
from auditor.protocols.tensor_operations import treatment_of

PLAIN = frozenset(
    {"shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad", "itemsize", "nbytes"}
)
"""Attributes of a tensor that are no part of its memory."""

SCALAR = frozenset({"len", "float", "int", "bool", "str", "repr", "sum", "min", "max", "any", "all", "abs"})


class Carriers:
    """The names through which a lease, or a part of it, may be reached."""

    def __init__(self, holder: str, value: Value, body: Sequence[ast.stmt]) -> None:
        self.names = {holder}
        self._copies = value is not Value.INDEX  # what is made of numbers is, or holds, the same numbers
        self._statements = list(statements_in(body))
        while self._spread():
            pass

    def _spread(self) -> bool:
        """Whether another name was found."""
        before = len(self.names)
        for statement in self._statements:
            match statement:
                case ast.Assign(targets=targets, value=value) if self.carries(value):
                    self.names |= {name for target in targets for name in _bound(target)}
                case ast.AnnAssign(target=target, value=ast.expr() as value) if self.carries(value):
                    self.names |= _bound(target)
                case ast.For(target=target, iter=over) | ast.AsyncFor(target=target, iter=over) if (
                    self.carries(over)
                ):
                    self.names |= _bound(target)
                case ast.With(items=items) | ast.AsyncWith(items=items):
                    for item in items:
                        if item.optional_vars is not None and self.carries(item.context_expr):
                            self.names |= _bound(item.optional_vars)
        return len(self.names) > before

    def carries(self, node: ast.expr) -> bool:
        """Whether the value of an expression may be the lease or share its memory."""
        match node:
            case ast.Name(id=name):
                return name in self.names
            case ast.Attribute(value=value, attr=attribute):
                return attribute not in PLAIN and self.carries(value)
            case ast.Subscript(value=value) | ast.Starred(value=value) | ast.Await(value=value):
                return self.carries(value)
            case ast.NamedExpr(value=value) | ast.Yield(value=ast.expr() as value):
                return self.carries(value)
            case ast.Call():
                return self._call_carries(node)
            case ast.BinOp(left=left, right=right):
                return not self._copies and (self.carries(left) or self.carries(right))
            case ast.Compare() | ast.Constant() | ast.JoinedStr():
                return False
            case ast.UnaryOp(operand=operand):
                return not self._copies and self.carries(operand)
            case ast.IfExp(body=body, orelse=orelse):
                return self.carries(body) or self.carries(orelse)
            case ast.BoolOp(values=values) | ast.Tuple(elts=values) | ast.List(elts=values):
                return any(self.carries(value) for value in values)
        return mentions(node, self.names)

    def _call_carries(self, call: ast.Call) -> bool:
        filled = [keyword.value for keyword in call.keywords if keyword.arg == "out"]
        if filled:
            return any(self.carries(value) for value in filled)
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        makes_new = treatment_of(name) == BORROWED or (isinstance(call.func, ast.Name) and name in SCALAR)
        if makes_new and self._copies:
            return False
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        receiver = [call.func.value] if isinstance(call.func, ast.Attribute) else []
        return any(self.carries(value) for value in (*given, *receiver))

    @property
    def may_outlive(self) -> bool:
        """Whether the lease, or a part of it, is returned, yielded, stored, or seen by a nested function."""
        return any(self._lets_go(statement) for statement in self._statements)

    def _lets_go(self, statement: ast.stmt) -> bool:
        if isinstance(statement, SCOPES):
            return mentions(statement, self.names)
        for node in _expressions_of(statement):
            if isinstance(node, ast.Lambda) and mentions(node, self.names):
                return True
            if isinstance(node, ast.Yield) and node.value is not None and self.carries(node.value):
                return True
        match statement:
            case ast.Return(value=ast.expr() as value):
                return self.carries(value)
            case ast.Assign(targets=targets, value=value) if self.carries(value):
                return any(self._keeps(target) for target in targets)
        return False

    def _keeps(self, target: ast.expr) -> bool:
        """Whether storing into `target` makes something else hold the value; a tensor's items are copied."""
        if isinstance(target, (ast.Tuple, ast.List)):
            return any(self._keeps(each) for each in target.elts)
        return isinstance(target, ast.Attribute) or (isinstance(target, ast.Subscript) and not self._copies)


def _expressions_of(statement: ast.stmt) -> list[ast.AST]:
    """The expressions of a statement itself, not of the statements in its blocks."""
    found: list[ast.AST] = []
    for value in ast.iter_child_nodes(statement):
        if isinstance(value, ast.expr):
            found += ast.walk(value)
    return found


def _bound(target: ast.expr) -> set[str]:
    return {
        node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
