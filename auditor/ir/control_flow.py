"""Branches and loops."""

import ast

from auditor.ir.assignments import AssignmentLowering
from auditor.ir.builder import End, LoopFrame
from auditor.ir.conditions import Condition, called_name, condition
from auditor.ir.further_turns import FURTHER, further_turn_tests
from auditor.ir.iterations import part_of
from auditor.ir.ops import ITERATED, Assume, Constant, Define, Edge, Havoc, Move, Nop, Path
from auditor.ir.patterns import asked_by, bound, sorts_alone, subject_of, told_from_none
from auditor.ir.turns import FLAG, OWN, counts_ranks, first_turn_tests, own_turn, ruled_out_at_first
from auditor.source.nodes import walk


class ControlFlowLowering(AssignmentLowering):
    """Lowers `if`, `match`, `for`, `while` and the jumps out of them."""

    def do_If(self, node: ast.If) -> None:
        yes, no = self.decide(node.test)
        self.builder.ends = yes
        self._meets_own_turn(node, True)
        self.body(node.body)
        after = self.builder.ends
        self.builder.ends = no
        self._meets_own_turn(node, False)
        self.body(node.orelse)
        self.builder.ends = after + self.builder.ends

    def do_Match(self, node: ast.Match) -> None:
        place = self.value(node.subject)
        subject = subject_of(node)
        kept = any(True for case in node.cases for _ in bound(case.pattern, place))
        if isinstance(subject, ast.Name) and subject is not node.subject and kept:
            self.builder.emit(Move(node.subject, (self.root(subject.id),), place))
            place = (self.root(subject.id),)
        after: list[End] = []
        for number, case in enumerate(node.cases, 1):
            test = told_from_none(case, node.cases[number:], subject) or asked_by(case.pattern, subject)
            self.builder.ends, missed = (self.builder.ends, []) if test is None else self.branch(test)
            if case is node.cases[-1] and case.guard is None and sorts_alone(case.pattern):
                missed = []
            for at, name, part in bound(case.pattern, place):
                self.builder.emit(Move(at, (self.root(name),), part))
            if case.guard is not None:
                yes, no = self.branch(case.guard)
                missed += no
                self.builder.ends = yes
            self.body(case.body)
            after += self.builder.ends
            self.builder.ends = missed
        self.builder.ends += after

    def do_For(self, node: ast.For | ast.AsyncFor) -> None:
        source = self._iterated(node.iter)
        counted = called_name(node.iter) in ("range", "enumerate")
        tests = first_turn_tests(node) if counted else {}
        ruled_out = ruled_out_at_first(node) if counted else []
        flag = (f"{FLAG}{len(self.graph.ops)}",)
        if tests or ruled_out:
            self.builder.emit(Constant(node, flag, True))
        own = self._own_turn(node) if counted else None
        further = self._further_turns(node) if counted else None
        is_async, part = isinstance(node, ast.AsyncFor), part_of(node.iter)
        turns, table = counts_ranks(node.iter), self.table_behind(node.iter)
        head, exits = self.loop_head(node.target, source, is_async, counted, part, turns, table)
        if tests or ruled_out:
            self._told_by_turn(node.target, flag, tests, ruled_out)
        if further is not None:
            self.builder.emit(Constant(node.target, further[1], False))
        self._loop(node, LoopFrame(head, own, further), exits)

    do_AsyncFor = do_For

    def _own_turn(self, node: ast.For | ast.AsyncFor) -> tuple[ast.If, bool, Path] | None:
        found = own_turn(node)
        if found is None:
            return None
        flag = (f"{OWN}{len(self.graph.ops)}",)
        self.builder.emit(Constant(node, flag, False))
        return *found, flag

    def _further_turns(self, node: ast.For | ast.AsyncFor) -> tuple[dict[str, bool], Path] | None:
        tests = further_turn_tests(node)
        if not tests:
            return None
        flag = (f"{FURTHER}{len(self.graph.ops)}",)
        self.builder.emit(Constant(node, flag, False))
        return tests, flag

    def assumed(self, node: ast.expr, asked: Condition, truth: bool) -> None:
        """Whoever asks whether this is the last turn knows it from there on."""
        for frame in self.builder.frames:
            if isinstance(frame, LoopFrame) and frame.further is not None:
                tests, flag = frame.further
                if tests.get(asked.key) is truth:
                    self.builder.emit(Constant(node, flag, True))

    def _meets_own_turn(self, node: ast.If, answer: bool) -> None:
        frame = self.builder.frames[-1] if self.builder.frames else None
        if isinstance(frame, LoopFrame) and frame.own is not None and frame.own[:2] == (node, answer):
            self.builder.emit(Constant(node.test, frame.own[2], True))

    def _told_by_turn(
        self, target: ast.expr, flag: Path, tests: dict[str, bool], ruled_out: list[Condition]
    ) -> None:
        """A branch for the first turn and one for the others, each with what its tests answer."""
        for key, truth in tests.items():
            self.builder.emit(Define(target, flag[0], key, truth, frozenset()))
        fork = self.builder.emit(Nop(target))
        ends: list[End] = []
        for first in (True, False):
            self.builder.ends = [(fork, Edge.NORMAL)]
            self.builder.emit(Assume(target, flag[0], first, frozenset(flag)))
            for asked in ruled_out if first else ():
                self.graph.condition_names[asked.key] = asked.names
                self.builder.emit(Assume(target, asked.key, False, asked.names))
            ends += self.builder.ends
        self.builder.ends = ends
        self.builder.emit(Constant(target, flag, False))

    def _iterated(self, node: ast.expr) -> Path:
        """Iterating an intermediate container: it lives as long as the loop. `range(len(x))` goes over x,
        `range(1, len(x))` over `x[1:]`."""
        path = self.value(_counted(node) or _joined(node) or node)
        if path[0][0] != "%":
            return path
        holder = (f"{ITERATED}{len(self.graph.ops)}",)
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
        if frame.further is not None:
            flag = frame.further[1]
            self.builder.emit(Assume(node, flag[0], False, frozenset(flag)))
        if frame.own is not None:
            flag = frame.own[2]
            self.builder.emit(Assume(node, flag[0], True, frozenset(flag)))
        if self.builder.reachable:
            self.body(node.orelse)
        self.builder.ends = self.builder.ends + frame.breaks

    def do_Break(self, node: ast.Break) -> None:
        self.builder.emit(Nop(node))
        self.builder.jump("break")

    def do_Continue(self, node: ast.Continue) -> None:
        self.builder.emit(Nop(node))
        self.builder.jump("continue")


def _joined(over: ast.expr) -> ast.expr | None:
    """`[*ring, *tree]` for `ring + tree`: what is gone over is no sum of numbers."""
    match over:
        case ast.BinOp(
            op=ast.Add(), left=ast.Name() | ast.Attribute() | ast.BinOp(), right=ast.Name() | ast.Attribute()
        ):
            left = _joined(over.left) or over.left
            parts = left.elts if isinstance(left, ast.List) else [ast.Starred(left, ast.Load())]
            return ast.copy_location(
                ast.List([*parts, ast.Starred(over.right, ast.Load())], ast.Load()), over
            )
    return None


def _counted(node: ast.expr) -> ast.expr | None:
    match node:
        case ast.Call(
            func=ast.Name(id="range"), args=[*_, ast.Call(func=ast.Name(id="len"), args=[counted])]
        ) if len(node.args) <= 2:
            return counted
    return None


def _conditions_in(test: ast.expr) -> frozenset[str]:
    """Keys of a loop's own test that read attributes: the body may change them out of sight."""
    keys = set()
    for node in walk(test):
        if isinstance(node, (ast.Compare, ast.Name, ast.Attribute, ast.Subscript, ast.Call)):
            asked = condition(node)
            if asked is not None and any(name.startswith(".") for name in asked.names):
                keys.add(asked.key)
    return frozenset(keys)
