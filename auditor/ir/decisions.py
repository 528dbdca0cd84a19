"""Tests to branches: which way is taken when, in words that later tests of the same thing share."""

import ast
from dataclasses import replace

from auditor.ir.builder import End
from auditor.ir.conditions import Condition, condition, path_of, path_tested, polled
from auditor.ir.lowering import Branches, Lowering
from auditor.ir.ops import Assume, Edge, Fresh, Nop, Path
from auditor.ir.standing import asks_itself


class DecisionLowering(Lowering):
    """Lowers tests for their outcome."""

    def branch(self, test: ast.expr) -> Branches:
        """Lower a test for its outcome; returns the ends on which it is true and those on which it is
        false."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            yes, no = self.branch(test.operand)
            return no, yes
        if (queue := _asked_if_empty(test)) is not None:
            yes, no = self.branch(queue)
            return no, yes
        if isinstance(test, ast.BoolOp):
            return self._short_circuit(test)
        if isinstance(test, ast.Constant):
            return self._constant_test(bool(test.value))
        if isinstance(test, ast.NamedExpr):
            return self._test_of(test.target, self.value(test))
        if isinstance(test, ast.Call) and (tested := path_tested(test)) is not None:
            return self._existence(test, tested)
        if isinstance(test, ast.Call | ast.Await) and (itself := asks_itself(test)) is not None:
            return self._existence(test, *itself)
        asked = condition(test)
        if asked is None and isinstance(test, ast.Compare) and len(test.ops) == 1:
            return self._compare_value(test)
        if asked is None:
            return self._test_of(test, self.value(test))
        asked = self._of_the_first(test, asked)
        subject = self._pure_path(asked.subject)
        return self._assume(test, asked, subject)

    def _of_the_first(self, test: ast.expr, asked: Condition) -> Condition:
        """`best != start` where `best = start` came before all else: whatever it is by now is not that."""
        match test:
            case ast.Compare(
                left=ast.Name() as left, ops=[ast.Eq() | ast.NotEq()], comparators=[ast.Name() as right]
            ):
                if asked.subject is None and (left.id, right.id) in self.began_as:
                    return replace(asked, subject=left, kind="same", other=right)
        return asked

    def _pure_path(self, node: ast.expr | None) -> Path | None:
        """The path of a subject that needs no evaluation."""
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
            running = self._pure_path(polled(test.left))
            kind = "none" if running is None else "granted"
            asked = Condition(
                f"{name} is None", isinstance(op, (ast.Is, ast.Eq)), frozenset({left[0]}), kind=kind
            )
            return self._assume(test, asked, running or left)
        if isinstance(op, ast.Is | ast.IsNot) and isinstance(right, ast.Name) and len(left) == 1:
            key, names = f"{left[0]} is {right.id}", frozenset({left[0], right.id})
            same = Condition(key, isinstance(op, ast.Is), names, kind="same", other=right)
            return self._assume(test, same, left)  # `table.setdefault(key, row) is not row`
        result = self.builder.temporary()
        self.builder.emit(Fresh(test, result, (left,)))
        if len(left) == 1 and _is_spelt_out(right):
            named = ast.copy_location(ast.Compare(ast.Name(left[0]), [op], [right]), test)
            if (known := condition(named)) is not None:
                return self._assume(test, known, left if known.subject is not None else None)
        return self._assume(test, Condition(result[0], True, frozenset({result[0]})), None)

    def _existence(self, test: ast.Call | ast.Await, tested: ast.expr, kind: str = "truth") -> Branches:
        """`os.path.exists(p)`, `lock.locked()`: asked anew each time, for files come and go; what is not
        there is not owed."""
        answer = self.value(test)
        asked = Condition(answer[0], True, frozenset({answer[0]}), kind=kind)
        return self._assume(test, asked, self._pure_path(tested))

    def _test_of(self, node: ast.expr, path: Path) -> Branches:
        """The truth of a value already computed."""
        asked = condition(node)
        if asked is not None and asked.kind == "truth" and asked.subject is not None and path[0][0] != "%":
            return self._assume(node, asked, self._pure_path(asked.subject) or path)
        read = frozenset({path[0], *(piece for piece in path[1:] if piece.startswith("."))})
        return self._assume(node, Condition("".join(path), True, read), path)

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
            self.assumed(node, asked, truth)
            branches.append(self.builder.ends)
        return branches[0], branches[1]

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


def _is_spelt_out(value: ast.expr) -> bool:
    """`-1`, `"busy"`, `BUSY`, `Status.BUSY`."""
    inner = value.operand if isinstance(value, ast.UnaryOp) else value
    match inner:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.isupper()
    return isinstance(inner, ast.Constant)


def _asked_if_empty(test: ast.expr) -> ast.expr | None:
    """`self.inbox` of `self.inbox.empty()`: it says what `not self.inbox` would of a list."""
    match test:
        case ast.Call(
            func=ast.Attribute(value=ast.Name() | ast.Attribute() as queue, attr="empty"),
            args=[],
            keywords=[],
        ):
            return queue
    return None
