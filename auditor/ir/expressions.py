"""Expressions to operations: every expression is lowered to the access path that holds its value."""

import ast

from auditor.ir.builder import End
from auditor.ir.calls import CallLowering
from auditor.ir.conditions import item_component
from auditor.ir.iterations import portion_of
from auditor.ir.lowering import Branches
from auditor.ir.ops import (
    ANY_ITEM,
    Await,
    Capture,
    Constant,
    Edge,
    Fresh,
    Lookup,
    Make,
    Move,
    Nop,
    Path,
    Store,
    Yield,
    is_temporary,
)
from auditor.ir.scope import defaults_of, free_names
from auditor.source.nodes import walk


class ExpressionLowering(CallLowering):
    """Lowers expressions that are neither calls nor comprehensions."""

    def value_Name(self, node: ast.Name) -> Path:
        return (self.root(node.id),)

    def value_Attribute(self, node: ast.Attribute) -> Path:
        if node.attr == "__getitem__":
            return self.value(node.value)  # whoever has that method has the table
        return (*self.value(node.value), "." + node.attr)

    def value_Subscript(self, node: ast.Subscript) -> Path:
        base = self.value(node.value)
        if isinstance(node.slice, (ast.Slice, ast.Tuple)):
            self._slice_uses(node.slice)
            return (*base, "[:]")
        found = (*base, item_component(node.slice))
        if not isinstance(node.slice, ast.Constant):
            self.builder.emit_lookup(Lookup(node, found, self.value(node.slice)))
        elif isinstance(node.ctx, ast.Load) and self.builder.expected_lookup is not None:
            self.builder.emit_lookup(Nop(node))
        return found

    def _slice_uses(self, node: ast.expr) -> None:
        for child in walk(node):
            if isinstance(child, (ast.Call, ast.NamedExpr)):
                self.value(child)
                return

    def value_Compare(self, node: ast.Compare) -> Path:
        """A comparison's result is a truth, never one of its operands."""
        for operand in (node.left, *node.comparators):
            self.value(operand)
        target = self.builder.temporary()
        self.builder.emit(Fresh(node, target))
        return target

    def value_BinOp(self, node: ast.BinOp) -> Path:
        """`[x] * n` and `xs + [x]` hold what their operands hold; other arithmetic makes something new."""
        displays = (ast.List, ast.Tuple, ast.ListComp)
        if not isinstance(node.op, (ast.Add, ast.Mult)) or (
            not isinstance(node.left, displays) and not isinstance(node.right, displays)
        ):
            return self._opaque(node)
        operands = [self.value(node.left), self.value(node.right)]
        target = self.builder.temporary()
        self.builder.emit(Make(node, target, tuple((ANY_ITEM, (*path, ANY_ITEM)) for path in operands)))
        return target

    def value_JoinedStr(self, node: ast.JoinedStr) -> Path:
        """A text is none of what it shows; of what nobody else names, it may be the only word."""
        shown = [self.value(part.value) for part in node.values if isinstance(part, ast.FormattedValue)]
        target = self.builder.temporary()
        self.builder.emit(Fresh(node, target, tuple(path for path in shown if is_temporary(path))))
        return target

    def value_Constant(self, node: ast.Constant) -> Path:
        target = self.builder.temporary()
        self.builder.emit(Constant(node, target, node.value))
        return target

    def value_NamedExpr(self, node: ast.NamedExpr) -> Path:
        source = self.value(node.value)
        target = (self.root(node.target.id),)
        self.builder.emit(Move(node, target, source))
        return target

    def value_Starred(self, node: ast.Starred) -> Path:
        return self.value(node.value)

    def value_Tuple(self, node: ast.Tuple | ast.List | ast.Set) -> Path:
        items = []
        starred = False
        for index, element in enumerate(node.elts):
            starred = starred or isinstance(element, ast.Starred)
            path = self.value(element)
            if isinstance(element, ast.Starred):
                items.append(("[*]", (*path, "[*]")))
            else:
                items.append(("[*]" if starred or not isinstance(node, ast.Tuple) else f"[{index}]", path))
        target = self.builder.temporary()
        self.builder.emit(Make(node, target, tuple(items)))
        return target

    value_List = value_Tuple
    value_Set = value_Tuple

    def value_Dict(self, node: ast.Dict) -> Path:
        items = []
        for key, element in zip(node.keys, node.values, strict=True):
            if key is not None:
                self.value(key)
                items.append((item_component(key), self.value(element)))
            else:
                items.append(("[*]", (*self.value(element), "[*]")))
        target = self.builder.temporary()
        self.builder.emit(Make(node, target, tuple(items)))
        return target

    def value_IfExp(self, node: ast.IfExp) -> Path:
        target = self.builder.temporary()
        yes, no = self.branch(node.test)
        ends: list[End] = []
        for start, arm in ((yes, node.body), (no, node.orelse)):
            self.builder.ends = start
            self.builder.emit(Move(arm, target, self.value(arm), portion_of(arm)))
            ends += self.builder.ends
        self.builder.ends = ends
        return target

    def value_BoolOp(self, node: ast.BoolOp) -> Path:
        """`a or b` yields one of the operands: the ones skipped past were false (`or`) or true (`and`)."""
        target = self.builder.temporary()
        ends: list[End] = []
        stop_when = isinstance(node.op, ast.Or)
        for operand in node.values[:-1]:
            yes, no = self._answered(operand, target)
            ends += yes if stop_when else no
            self.builder.ends = no if stop_when else yes
        last = node.values[-1]
        self.builder.emit(Move(last, target, self.value(last)))
        self.builder.ends += ends
        return target

    def _answered(self, operand: ast.expr, target: Path) -> Branches:
        """An operand's ways; where it ends the whole, it is its value. `lease is None` is a truth, and tells
        of the lease what it tells in an `if`."""
        if _is_a_truth(operand):
            self.builder.emit(Fresh(operand, target))
            return self.branch(operand)
        path = self.value(operand)
        self.builder.emit(Move(operand, target, path))
        return self._test_of(operand, path)

    def value_Lambda(self, node: ast.Lambda) -> Path:
        target = self.builder.temporary()
        defaults = [(name, self.value(value)) for name, value in defaults_of(node)]
        self.builder.emit(Capture(node, target, node, free_names(node, self.scope.local)))
        for name, path in defaults:
            self.builder.emit(Store(node, (*target, f"<{name}>"), path))
        return target

    def value_Await(self, node: ast.Await) -> Path:
        if (each := _awaited_together(node.value)) is not None:
            return self.value_Tuple(each)
        source = self.value(node.value)
        target = self.builder.temporary()
        self.builder.emit_interruptible(Await(node, target, source), Edge.CANCEL)
        return target

    def value_Yield(self, node: ast.Yield) -> Path:
        source = self.value(node.value) if node.value is not None else None
        return self._yield(Yield(node, self.builder.temporary(), source))

    def value_YieldFrom(self, node: ast.YieldFrom) -> Path:
        return self._yield(Yield(node, self.builder.temporary(), self.value(node.value)))

    def _yield(self, op: Yield) -> Path:
        self.builder.emit_interruptible(op, Edge.CLOSE)
        return op.target


def _is_a_truth(operand: ast.expr) -> bool:
    """What it yields is none of its operands."""
    match operand:
        case ast.Compare() | ast.UnaryOp(op=ast.Not()) | ast.Call(func=ast.Name(id="isinstance")):
            return True
    return False


def _awaited_together(value: ast.expr) -> ast.Tuple | None:
    """`await asyncio.gather(a(), b())` is `(await a(), await b())` to whoever takes it apart."""
    match value:
        case ast.Call(
            func=ast.Attribute(attr="gather") | ast.Name(id="gather"), args=[_, _, *_] as args, keywords=[]
        ):
            if not any(isinstance(each, ast.Starred) for each in args):
                awaited: list[ast.expr] = [ast.copy_location(ast.Await(each), each) for each in args]
                return ast.copy_location(ast.Tuple(awaited, ast.Load()), value)
    return None
