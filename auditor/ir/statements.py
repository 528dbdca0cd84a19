"""Statements to operations and edges."""

import ast

from auditor.ir.builder import Builder, CleanupFrame, End, HandlerFrame, LoopFrame, exit_of
from auditor.ir.conditions import condition, item_component
from auditor.ir.expressions import ExpressionLowering
from auditor.ir.handlers import UNKNOWN, Handler, Raised
from auditor.ir.ops import (
    ANY_ITEM,
    RESULT,
    Assume,
    Capture,
    Constant,
    Define,
    Delete,
    Edge,
    EndStatement,
    Enter,
    Fresh,
    Havoc,
    InPlace,
    Leave,
    Make,
    Move,
    Nop,
    Path,
    Store,
    Unpack,
    Way,
)
from auditor.ir.scope import Scope, defaults_of, free_names

SUPPRESSING = frozenset({"suppress"})


class StatementLowering(ExpressionLowering):
    """Lowers the body of one function."""

    def __init__(self, builder: Builder, scope: Scope) -> None:
        super().__init__(builder, scope)
        self._handling: list[Raised] = []

    def body(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            if not self.builder.reachable:
                return
            getattr(self, f"do_{type(statement).__name__}", self._other)(statement)

    def _other(self, node: ast.stmt) -> None:
        """Statements that neither hold nor move anything (pass, global, nonlocal, type)."""

    def _end(self, node: ast.AST) -> None:
        if self.builder.reachable:
            self.builder.emit(EndStatement(node))

    # Simple statements --------------------------------------------------------------------------------------

    def do_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return
        self.value(node.value)
        self._end(node)

    def do_Assign(self, node: ast.Assign) -> None:
        if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            self._define_flag(node.targets[0], node.value)
        if self._assign_simply(node):
            return
        source = self.value(node.value)
        for target in node.targets:
            self.assign(target, source)
        self._end(node)

    def _assign_simply(self, node: ast.Assign) -> bool:
        """`x = None`, and `a, *b = x, y, z` where each element's fate can be told apart."""
        target = node.targets[0]
        if isinstance(node.value, ast.Constant) and all(isinstance(name, ast.Name) for name in node.targets):
            for name in node.targets:
                assert isinstance(name, ast.Name)
                self.builder.emit(Constant(node, (self.root(name.id),), node.value.value))
            return True
        if len(node.targets) == 1 and isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            stars = [index for index, element in enumerate(target.elts) if isinstance(element, ast.Starred)]
            if not stars and len(target.elts) == len(node.value.elts):
                self._assign_pairwise(node, target, node.value)
                return True
            if len(stars) == 1 and not any(isinstance(element, ast.Starred) for element in node.value.elts):
                self._assign_starred(node, target, node.value, stars[0])
                return True
        return False

    def _assign_pairwise(self, node: ast.Assign, target: ast.Tuple, value: ast.Tuple) -> None:
        """All values first, then all names: `a, b = b, a` swaps."""
        sources = []
        for element in value.elts:
            source = self.value(element)
            if source[0][0] != "%":
                held = self.builder.temporary()
                self.builder.emit(Move(element, held, source))
                source = held
            sources.append(source)
        for name, source in zip(target.elts, sources, strict=True):
            self.assign(name, source)
        self._end(node)

    def _assign_starred(self, node: ast.Assign, target: ast.Tuple, value: ast.Tuple, star: int) -> None:
        sources = [self.value(element) for element in value.elts]
        after = len(target.elts) - star - 1
        middle = sources[star : len(sources) - after]
        rest = self.builder.temporary()
        self.builder.emit(Make(node, rest, tuple((ANY_ITEM, path) for path in middle)))
        placed = [*sources[:star], rest, *sources[len(sources) - after :]]
        for element, source in zip(target.elts, placed, strict=False):
            self.assign(element, source)
        self._end(node)

    def do_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assign(node.target, self.value(node.value))
            self._end(node)

    def _define_flag(self, target: ast.Name, test: ast.expr) -> None:
        """`flag = x is not None`: a later test of the flag is a test of x."""
        negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        inner = test.operand if isinstance(test, ast.UnaryOp) and negated else test
        if not isinstance(inner, (ast.Compare, ast.Name, ast.Attribute)):
            return
        asked = condition(inner)
        if asked is None or target.id in asked.names:
            return
        self.graph.condition_names[asked.key] = asked.names
        self._pending_define = Define(test, target.id, asked.key, asked.positive != negated, asked.names)

    _pending_define: Define | None = None

    def assign(self, target: ast.expr, source: Path) -> None:
        if isinstance(target, ast.Name):
            self.builder.emit(Move(target, (self.root(target.id),), source))
            if self._pending_define is not None:
                self.builder.emit(self._pending_define)
                self._pending_define = None
        elif isinstance(target, ast.Attribute):
            self.builder.emit(Store(target, (*self.value(target.value), "." + target.attr), source))
        elif isinstance(target, ast.Subscript):
            self._assign_item(target, source)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, source)
        elif isinstance(target, (ast.Tuple, ast.List)):
            self._unpack(target, source)

    def _assign_item(self, target: ast.Subscript, source: Path) -> None:
        base = self.value(target.value)
        sliced = isinstance(target.slice, (ast.Slice, ast.Tuple)) or (
            isinstance(target.slice, ast.Constant) and target.slice.value is ...
        )
        if sliced:
            self._slice_uses(target.slice)
            self.builder.emit(Store(target, (*base, "[:]"), source, sliced=True))
            return
        if not isinstance(target.slice, (ast.Constant, ast.Name)):
            self.value(target.slice)
        self.builder.emit(Store(target, (*base, item_component(target.slice)), source))

    def _unpack(self, target: ast.Tuple | ast.List, source: Path) -> None:
        plain = not any(isinstance(element, ast.Starred) for element in target.elts)
        pieces: list[tuple[str, Path]] = []
        deferred: list[tuple[ast.expr, Path]] = []
        for index, element in enumerate(target.elts):
            inner = element.value if isinstance(element, ast.Starred) else element
            path = (self.root(inner.id),) if isinstance(inner, ast.Name) else self.builder.temporary()
            pieces.append((f"[{index}]" if plain else ANY_ITEM, path))
            if not isinstance(inner, ast.Name):
                deferred.append((inner, path))
        self.builder.emit(Unpack(target, tuple(pieces), source))
        for inner, path in deferred:
            self.assign(inner, path)

    def do_AugAssign(self, node: ast.AugAssign) -> None:
        operand = self.value(node.value)
        self.builder.emit(InPlace(node, self.value(node.target), operand))
        self._end(node)

    def do_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            for single in target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]:
                self.builder.emit(Delete(single, self.value(single)))
        self._end(node)

    def do_Return(self, node: ast.Return) -> None:
        if node.value is None:
            self.builder.emit(Constant(node, RESULT, None))
        else:
            self.builder.emit(Move(node, RESULT, self.value(node.value)))
        self._end(node)
        self.builder.leave(Leave(node, Way.RETURN))

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
        if no:
            self._raise(node, Raised("AssertionError"))
        self.builder.ends = yes

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

    # Branches -----------------------------------------------------------------------------------------------

    def decide(self, test: ast.expr) -> tuple[list[End], list[End]]:
        """The two ways on from a statement's test; what the test computed on the way dies on both."""
        before = self.builder.temporaries
        yes, no = self.branch(test)
        if self.builder.temporaries == before:
            return yes, no
        ways = []
        for ends in (yes, no):
            self.builder.ends = ends
            self._end(test)
            ways.append(self.builder.ends)
        return ways[0], ways[1]

    def do_If(self, node: ast.If) -> None:
        yes, no = self.decide(node.test)
        self.builder.ends = yes
        self.body(node.body)
        after = self.builder.ends
        self.builder.ends = no
        self.body(node.orelse)
        self.builder.ends = after + self.builder.ends

    def do_Match(self, node: ast.Match) -> None:
        subject = self.value(node.subject)
        after: list[End] = []
        for case in node.cases:
            fork = self.builder.emit(Nop(case.pattern))
            self.builder.ends = [(fork, Edge.NORMAL)]
            self._pattern(case.pattern, subject)
            missed: list[End] = [] if _irrefutable(case.pattern) else [(fork, Edge.NORMAL)]
            if case.guard is not None:
                yes, no = self.branch(case.guard)
                missed += no
                self.builder.ends = yes
            self.body(case.body)
            after += self.builder.ends
            self.builder.ends = missed
        self.builder.ends += after

    def _pattern(self, pattern: ast.pattern, subject: Path) -> None:
        """Names bound by a pattern may be the subject or a part of it."""
        value = pattern.value if isinstance(pattern, ast.MatchSingleton) else ...
        if value is None:
            key = "".join(subject) + " is None"
            names = frozenset({subject[0]})
            self.graph.condition_names[key] = names
            self.builder.emit(Assume(pattern, key, True, names, subject, "none"))
        for inner in ast.walk(pattern):
            name = getattr(inner, "name", None) or getattr(inner, "rest", None)
            if isinstance(name, str):
                whole = inner is pattern or inner in getattr(pattern, "patterns", [None])[:0]
                self.builder.emit(Move(inner, (self.root(name),), subject if whole else (*subject, ANY_ITEM)))

    # Loops --------------------------------------------------------------------------------------------------

    def do_For(self, node: ast.For | ast.AsyncFor) -> None:
        source = self._iterated(node.iter)
        counted = _call_name(node.iter) in ("range", "enumerate")
        head, exits = self.loop_head(node.target, source, isinstance(node, ast.AsyncFor), counted)
        self._loop(node, LoopFrame(head), exits)

    do_AsyncFor = do_For

    def _iterated(self, node: ast.expr) -> Path:
        """Iterating an intermediate container: it lives as long as the loop. `range(len(x))` goes over x."""
        path = self.value(_counted(node) or node)
        if path[0][0] != "%":
            return path
        holder = (f"iterated~{len(self.graph.ops)}",)
        self.builder.emit(Move(node, holder, path))
        return holder

    def do_While(self, node: ast.While) -> None:
        head = self.builder.emit(Havoc(node, _conditions_in(node.test)))
        yes, no = self.decide(node.test)
        self.builder.ends = yes
        self._loop(node, LoopFrame(head), no)

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, frame: LoopFrame, exits: list[End]) -> None:
        self.builder.frames.append(frame)
        self.body(node.body)
        self.builder.close_loop(frame.head)
        self.builder.frames.pop()
        self.builder.ends = exits
        if self.builder.reachable:
            self.body(node.orelse)
        self.builder.ends = self.builder.ends + frame.breaks

    def do_Break(self, node: ast.Break) -> None:
        self.builder.emit(Nop(node))
        self.builder.jump("break")

    def do_Continue(self, node: ast.Continue) -> None:
        self.builder.emit(Nop(node))
        self.builder.jump("continue")

    # With and try -------------------------------------------------------------------------------------------

    def do_With(self, node: ast.With | ast.AsyncWith) -> None:
        self._with_items(node, node.items)

    do_AsyncWith = do_With

    def _with_items(self, node: ast.With | ast.AsyncWith, items: list[ast.withitem]) -> None:
        if not items:
            self.body(node.body)
            return
        item = items[0]
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
        if _call_name(expression) in SUPPRESSING:
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


def _raised_class(node: ast.expr | None) -> Raised:
    """The raised class's name; a bare `raise` or a raised variable may be anything."""
    callee = node.func if isinstance(node, ast.Call) else node
    name = callee.attr if isinstance(callee, ast.Attribute) else getattr(callee, "id", "")
    return Raised(name) if isinstance(name, str) and name[:1].isupper() else UNKNOWN


def _caught(handler: ast.ExceptHandler) -> tuple[str, ...] | None:
    if handler.type is None:
        return None
    return _listed(handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type])


def _listed(types: list[ast.expr]) -> tuple[str, ...]:
    return tuple(kind.attr if isinstance(kind, ast.Attribute) else getattr(kind, "id", "?") for kind in types)


def _counted(node: ast.expr) -> ast.expr | None:
    match node:
        case ast.Call(func=ast.Name(id="range"), args=[ast.Call(func=ast.Name(id="len"), args=[counted])]):
            return counted
    return None


def _call_name(node: ast.expr) -> str:
    callee = node.func if isinstance(node, ast.Call) else node
    return callee.attr if isinstance(callee, ast.Attribute) else getattr(callee, "id", "")


def _irrefutable(pattern: ast.pattern) -> bool:
    return isinstance(pattern, ast.MatchAs) and pattern.pattern is None


def _conditions_in(test: ast.expr) -> frozenset[str]:
    """Keys of a loop's own test that read attributes: the body may change them out of sight."""
    keys = set()
    for node in ast.walk(test):
        if isinstance(node, (ast.Compare, ast.Name, ast.Attribute, ast.Subscript, ast.Call)):
            asked = condition(node)
            if asked is not None and any(name.startswith(".") for name in asked.names):
                keys.add(asked.key)
    return frozenset(keys)
