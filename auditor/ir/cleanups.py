"""Ways out that somebody waits for: `with`, `try`, and what is raised to them."""

import ast

from auditor.ir.builder import Builder, CleanupFrame, HandlerFrame, exit_of
from auditor.ir.conditions import called_name
from auditor.ir.control_flow import ControlFlowLowering
from auditor.ir.handlers import UNKNOWN, Handler, Raised
from auditor.ir.ops import Edge, Enter, Fresh, Move, Nop
from auditor.ir.scope import Scope

SUPPRESSING = frozenset({"suppress"})


class CleanupLowering(ControlFlowLowering):
    """Lowers `with`, `try`, `raise` and `assert`."""

    def __init__(self, builder: Builder, scope: Scope) -> None:
        super().__init__(builder, scope)
        self._handling: list[Raised] = []  # what a bare `raise` would raise

    def do_With(self, node: ast.With | ast.AsyncWith) -> None:
        self._with_items(node, node.items)

    do_AsyncWith = do_With

    def _with_items(self, node: ast.With | ast.AsyncWith, items: list[ast.withitem]) -> None:
        if not items:
            self.body(node.body)
            return
        item = items[0]
        if (plain := _does_nothing(item.context_expr)) is not None:
            value = self.value(plain)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, value)
            self._end(item.context_expr)
            self._with_items(node, items[1:])
            return
        asynchronous = isinstance(node, ast.AsyncWith)
        frame = self._enter(node, item, asynchronous)
        self.builder.frames.append(frame)
        self._with_items(node, items[1:])
        self.builder.frames.pop()
        if self.builder.reachable:
            frame.lower()
        if frame.suppressed:
            self.builder.ends = self.builder.ends + frame.suppressed

    def _enter(self, node: ast.With | ast.AsyncWith, item: ast.withitem, asynchronous: bool) -> CleanupFrame:
        expression = item.context_expr
        if isinstance(expression, ast.Call):
            context = self.value_Call(expression, entered=True)
        else:
            context = self.value(expression)
        holder = (f"context~{len(self.graph.ops)}",) if context[0][0] == "%" else context
        if holder != context:
            self.builder.emit(Move(expression, holder, context))
        entered = self.builder.temporary()
        enter = Enter(expression, entered, holder)
        if asynchronous:
            self.builder.emit_interruptible(enter, Edge.CANCEL)
        else:
            self.builder.emit(enter)
        frame = CleanupFrame(node, exit_of(self.builder, node, holder, asynchronous))
        if called_name(expression) in SUPPRESSING:
            frame.suppressed = []
            frame.suppresses = _listed(expression.args) if isinstance(expression, ast.Call) else ()
        if item.optional_vars is not None:
            self.assign(item.optional_vars, entered)
        self._end(item.context_expr)
        return frame

    def do_Try(self, node: ast.Try) -> None:
        cleanup = CleanupFrame(node, lambda: self.body(node.finalbody)) if node.finalbody else None
        if cleanup is not None:
            self.builder.frames.append(cleanup)
        self._try_except(node)
        if cleanup is not None:
            self.builder.frames.pop()
            if self.builder.reachable:
                self.body(node.finalbody)

    do_TryStar = do_Try

    def _try_except(self, node: ast.Try) -> None:
        handlers = [Handler(self.graph.add(Nop(handler)), _caught(handler)) for handler in node.handlers]
        if handlers:
            self.builder.frames.append(HandlerFrame(node, handlers))
        self.body(node.body)
        if handlers:
            self.builder.frames.pop()
        if self.builder.reachable:
            self.body(node.orelse)
        after = self.builder.ends
        for index, (handler, syntax) in enumerate(zip(handlers, node.handlers, strict=True)):
            self.builder.ends = [(handler.entry, Edge.NORMAL)]
            if syntax.name:
                self.builder.emit(Fresh(syntax, (self.root(syntax.name),)))
            self._handling.append(handler.raises_again(handlers[:index]))
            self.body(syntax.body)
            self._handling.pop()
            after = after + self.builder.ends
        self.builder.ends = after

    def do_Raise(self, node: ast.Raise) -> None:
        if node.exc is not None:
            self.value(node.exc)
        again = node.exc is None and bool(self._handling)
        self._raise(node, self._handling[-1] if again else _raised_class(node.exc))

    def _raise(self, node: ast.stmt, exception: Raised) -> None:
        raised = self.builder.emit(Nop(node))
        self.graph.connect(raised, self.builder.raise_target(exception), Edge.RAISE)
        self.builder.ends = []

    def do_Assert(self, node: ast.Assert) -> None:
        yes, no = self.branch(node.test)
        self.builder.ends = no
        if no and not _only_narrows(node.test):
            self._raise(node, Raised("AssertionError"))
        self.builder.ends = yes


def _only_narrows(test: ast.expr) -> bool:
    """`assert isinstance(x, Block)` and `assert block.tensor is not None` tell a type checker what is known;
    `assert block is not None` may be the only look at what a pool gave.
    """
    match test:
        case ast.BoolOp(op=ast.And(), values=values):
            return all(map(_only_narrows, values))
        case ast.Call(func=ast.Name(id="isinstance")):
            return True
        case ast.Compare(left=ast.Attribute(), ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
            return True
    return False


def _raised_class(node: ast.expr | None) -> Raised:
    """The raised class's name; a bare `raise` or a raised variable may be anything."""
    callee = node.func if isinstance(node, ast.Call) else node
    name = callee.attr if isinstance(callee, ast.Attribute) else getattr(callee, "id", "")
    return Raised(name) if isinstance(name, str) and name[:1].isupper() else UNKNOWN


def _caught(handler: ast.ExceptHandler) -> tuple[str, ...] | None:
    if handler.type is None:
        return None
    return _listed(handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type])


def _does_nothing(context: ast.expr) -> ast.expr | None:
    """`with nullcontext(tool) as pen:` is `pen = tool`."""
    match context:
        case ast.Call(args=[given], keywords=[]) if called_name(context) == "nullcontext":
            return given
    return None


def _listed(types: list[ast.expr]) -> tuple[str, ...]:
    return tuple(kind.attr if isinstance(kind, ast.Attribute) else getattr(kind, "id", "?") for kind in types)
