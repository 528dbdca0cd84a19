"""Expressions to operations: every expression is lowered to the access path that holds its value."""

import ast

from auditor.ir.builder import Builder, End
from auditor.ir.conditions import Condition, condition, item_component
from auditor.ir.ops import (
    ANY_ITEM,
    Assume,
    Await,
    Call,
    Capture,
    Constant,
    Edge,
    Fresh,
    Lookup,
    Make,
    Move,
    Next,
    Nop,
    Path,
    Store,
    Yield,
)
from auditor.ir.scope import Scope, defaults_of, free_names

LOGGING = frozenset({"debug", "info", "warning", "warn", "error", "exception", "critical", "log"})


def _is_quiet(method: str, receiver: Path | None) -> bool:
    if method in LOGGING:
        return receiver is not None and "log" in receiver[-1].lower()
    return method in QUIET_CALLS or (receiver is None and method.endswith(("Error", "Exception", "Warning")))


Branches = tuple[list[End], list[End]]

QUIET_CALLS = frozenset(
    {
        "isinstance", "issubclass", "len", "id", "type", "hasattr", "callable", "print", "range", "repr",
        "str", "bool",
        "tuple", "list", "dict", "set", "frozenset", "enumerate", "zip", "reversed", "super",
        "perf_counter", "monotonic", "time", "time_ns",
        "perf_counter_ns", "closing", "aclosing", "nullcontext", "ExitStack", "AsyncExitStack", "callback",
        "suppress", "append", "extend", "insert", "update", "appendleft", "add", "discard", "clear",
        "items", "values", "keys", "setdefault",
        "size", "dim", "data_ptr", "numel", "is_contiguous", "element_size", "startswith", "endswith", "cast",
    }
)  # fmt: skip
"""Calls that practice never sees raise: an exception edge out of each would bury the ones that matter."""


class ExpressionLowering:
    """Lowers expressions of one function into a builder."""

    def __init__(self, builder: Builder, scope: Scope) -> None:
        self.builder = builder
        self.scope = scope
        self.graph = builder.graph
        self._renamed: list[dict[str, str]] = []
        self._comprehensions = 0

    # Names --------------------------------------------------------------------------------------------------

    def root(self, name: str) -> str:
        for names in reversed(self._renamed):
            if name in names:
                return names[name]
        return self.scope.root(name)

    # Values -------------------------------------------------------------------------------------------------

    def value(self, node: ast.expr) -> Path:
        method = getattr(self, f"value_{type(node).__name__}", None)
        result: Path = method(node) if method is not None else self._opaque(node)
        return result

    def _opaque(self, node: ast.AST) -> Path:
        """An expression whose value is none of its parts."""
        uses = tuple(self.value(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))
        target = self.builder.temporary()
        self.builder.emit(Fresh(node, target, uses))
        return target

    def value_Name(self, node: ast.Name) -> Path:
        return (self.root(node.id),)

    def value_Attribute(self, node: ast.Attribute) -> Path:
        return (*self.value(node.value), "." + node.attr)

    def value_Subscript(self, node: ast.Subscript) -> Path:
        base = self.value(node.value)
        if isinstance(node.slice, (ast.Slice, ast.Tuple)):
            self._slice_uses(node.slice)
            return (*base, "[:]")
        found = (*base, item_component(node.slice))
        if not isinstance(node.slice, ast.Constant):
            self.builder.emit(Lookup(node, found, self.value(node.slice)))
        return found

    def _slice_uses(self, node: ast.expr) -> None:
        for child in ast.walk(node):
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
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.value(part.value)
        target = self.builder.temporary()
        self.builder.emit(Fresh(node, target))
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
            self.builder.emit(Move(arm, target, self.value(arm)))
            ends += self.builder.ends
        self.builder.ends = ends
        return target

    def value_BoolOp(self, node: ast.BoolOp) -> Path:
        """`a or b` yields one of the operands: the ones skipped past were false (`or`) or true (`and`)."""
        target = self.builder.temporary()
        ends: list[End] = []
        stop_when = isinstance(node.op, ast.Or)
        for operand in node.values[:-1]:
            path = self.value(operand)
            self.builder.emit(Move(operand, target, path))
            yes, no = self._test_of(operand, path)
            ends += yes if stop_when else no
            self.builder.ends = no if stop_when else yes
        last = node.values[-1]
        self.builder.emit(Move(last, target, self.value(last)))
        self.builder.ends += ends
        return target

    def value_Lambda(self, node: ast.Lambda) -> Path:
        target = self.builder.temporary()
        defaults = [(name, self.value(value)) for name, value in defaults_of(node)]
        self.builder.emit(Capture(node, target, node, free_names(node, self.scope.local)))
        for name, path in defaults:
            self.builder.emit(Store(node, (*target, f"<{name}>"), path))
        return target

    def value_Await(self, node: ast.Await) -> Path:
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

    # Calls --------------------------------------------------------------------------------------------------

    def value_Call(self, node: ast.Call, *, entered: bool = False) -> Path:
        if getattr(node.func, "id", "") == "super" and self.scope.parameters:
            return (self.scope.parameters[0],)
        read = self._attribute_read(node)
        if read is not None:
            return read
        receiver = callee = None
        method = ""
        if isinstance(node.func, ast.Attribute):
            receiver = self.value(node.func.value)
            method = node.func.attr
            callee = (*receiver, "." + method)
        else:
            callee = self.value(node.func)
            method = node.func.id if isinstance(node.func, ast.Name) else ""
        args = tuple((self.value(arg), isinstance(arg, ast.Starred)) for arg in node.args)
        kwargs = tuple((keyword.arg, self.value(keyword.value)) for keyword in node.keywords)
        target = self.builder.temporary()
        call = Call(node, target, callee, receiver, method, args, kwargs, entered)
        if _is_quiet(method, receiver):
            self.builder.emit(call)
        else:
            self.builder.emit_raising(call)
        return target

    def _attribute_read(self, node: ast.Call) -> Path | None:
        """`getattr(x, "name", default)` reads an attribute."""
        match node:
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str(name)), *_]):
                return (*self.value(owner), "." + name)
        return None

    # Comprehensions -----------------------------------------------------------------------------------------

    def value_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> Path:
        return self._comprehension(node, node.generators, (node.elt,))

    value_SetComp = value_ListComp
    value_GeneratorExp = value_ListComp

    def value_DictComp(self, node: ast.DictComp) -> Path:
        return self._comprehension(node, node.generators, (node.key, node.value))

    def _comprehension(
        self, node: ast.expr, generators: list[ast.comprehension], elements: tuple[ast.expr, ...]
    ) -> Path:
        """As a loop that appends to a fresh container; its variables get names of their own."""
        self._comprehensions += 1
        names = {
            name.id: f"{name.id}~{self._comprehensions}"
            for generator in generators
            for name in ast.walk(generator.target)
            if isinstance(name, ast.Name)
        }
        target = (f"comprehension~{self._comprehensions}",)
        self.builder.emit(Make(node, target, ()))
        exits = self._comprehension_level(node, generators, elements, target, names)
        self.builder.ends = exits
        result = self.builder.temporary()
        self.builder.emit(Move(node, result, target))
        self.builder.emit(Constant(node, target, None))
        return result

    def _comprehension_level(
        self,
        node: ast.expr,
        generators: list[ast.comprehension],
        elements: tuple[ast.expr, ...],
        target: Path,
        names: dict[str, str],
    ) -> list[End]:
        generator, rest = generators[0], generators[1:]
        source = self.value(generator.iter)
        self._renamed.append(names)
        head, exits = self.loop_head(generator.target, source, generator.is_async)
        skipped: list[End] = []
        for test in generator.ifs:
            yes, no = self.branch(test)
            skipped += no
            self.builder.ends = yes
        if rest:
            self.builder.ends = self._comprehension_level(node, rest, elements, target, names)
        else:
            for element in elements[:-1]:
                self.value(element)
            self._append(node, target, self.value(elements[-1]))
        self.builder.ends += skipped
        self.builder.close_loop(head)
        self._renamed.pop()
        return exits

    def _append(self, node: ast.expr, target: Path, element: Path) -> None:
        self.builder.emit(Store(node, (*target, "[*]"), element))

    def loop_head(
        self, target: ast.expr, source: Path, is_async: int | bool, counted: bool = False
    ) -> tuple[int, list[End]]:
        """Emits the `Next` of a loop; returns it and the ends on which the loop is exhausted."""
        element = self.builder.temporary() if not isinstance(target, ast.Name) else (self.root(target.id),)
        op = Next(target, element, source, counted)
        if is_async:
            head = self.builder.emit_interruptible(op, Edge.CANCEL)
        else:
            head = self.builder.emit(op)
        self.builder.ends = [(head, Edge.BODY)]
        if not isinstance(target, ast.Name):
            self.assign(target, element)
        return head, [(head, Edge.EXHAUSTED)]

    def assign(self, target: ast.expr, source: Path) -> None:
        raise TypeError("statements assign")  # pragma: no cover - overridden by StatementLowering

    # Conditions ---------------------------------------------------------------------------------------------

    def branch(self, test: ast.expr) -> Branches:
        """Lower a test for its outcome; returns the ends on which it is true and those on which it is
        false."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            yes, no = self.branch(test.operand)
            return no, yes
        if isinstance(test, ast.BoolOp):
            return self._short_circuit(test)
        if isinstance(test, ast.Constant):
            return self._constant_test(bool(test.value))
        if isinstance(test, ast.NamedExpr):
            return self._test_of(test.target, self.value(test))
        asked = condition(test)
        if asked is None and isinstance(test, ast.Compare) and len(test.ops) == 1:
            return self._compare_value(test)
        if asked is None:
            return self._test_of(test, self.value(test))
        subject = self._pure_path(asked.subject)
        return self._assume(test, asked, subject)

    def _pure_path(self, node: ast.expr | None) -> Path | None:
        """The path of a subject that needs no evaluation."""
        from auditor.ir.conditions import path_of

        path = path_of(node) if node is not None else None
        return (self.root(path[0]), *path[1:]) if path else None

    def _compare_value(self, test: ast.Compare) -> Branches:
        """`f(x) is None`, `(t := acquire()) is not None`: the tested object is an intermediate value."""
        left = self.value(test.left)
        self.value(test.comparators[0])
        op, right = test.ops[0], test.comparators[0]
        none = isinstance(right, ast.Constant) and right.value is None
        if none and isinstance(op, (ast.Is, ast.Eq, ast.IsNot, ast.NotEq)):
            name = left[0] if len(left) == 1 else "".join(left)
            asked = Condition(
                f"{name} is None", isinstance(op, (ast.Is, ast.Eq)), frozenset({left[0]}), kind="none"
            )
            return self._assume(test, asked, left)
        result = self.builder.temporary()
        self.builder.emit(Fresh(test, result, (left,)))
        return self._assume(test, Condition(result[0], True, frozenset({result[0]})), None)

    def _test_of(self, node: ast.expr, path: Path) -> Branches:
        """The truth of a value already computed."""
        asked = condition(node)
        if asked is not None and asked.kind == "truth" and asked.subject is not None and path[0][0] != "%":
            return self._assume(node, asked, self._pure_path(asked.subject) or path)
        key = "".join(path)
        return self._assume(node, Condition(key, True, frozenset({path[0]})), path)

    def _short_circuit(self, test: ast.BoolOp) -> Branches:
        decided: list[End] = []
        stop_when = isinstance(test.op, ast.Or)
        for operand in test.values:
            yes, no = self.branch(operand)
            decided += yes if stop_when else no
            self.builder.ends = no if stop_when else yes
        last = self.builder.ends
        yes, no = (decided, last) if stop_when else (last, decided)
        return self._remember_whole(test, yes, no)

    def _remember_whole(self, test: ast.BoolOp, yes: list[End], no: list[End]) -> Branches:
        """`if a or b` twice: which of the two held is forgotten where the ways meet, that one of them did
        is not."""
        asked = condition(test)
        if asked is None:
            return yes, no
        self.graph.condition_names[asked.key] = asked.names
        ways = []
        for ends, value in ((yes, True), (no, False)):
            self.builder.ends = ends
            if ends:
                self.builder.emit(Assume(test, asked.key, value, asked.names))
            ways.append(self.builder.ends)
        return ways[0], ways[1]

    def _constant_test(self, value: bool) -> Branches:
        return (self.builder.ends, []) if value else ([], self.builder.ends)

    def _assume(self, node: ast.expr, asked: Condition, subject: Path | None) -> Branches:
        self.graph.condition_names[asked.key] = asked.names
        fork = self.builder.emit(Nop(node))
        branches = []
        for value in (True, False):
            self.builder.ends = [(fork, Edge.NORMAL)]
            truth = value == asked.positive
            other = self._pure_path(asked.other)
            self.builder.emit(Assume(node, asked.key, truth, asked.names, subject, asked.kind, other))
            branches.append(self.builder.ends)
        return branches[0], branches[1]
