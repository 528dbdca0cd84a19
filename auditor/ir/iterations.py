"""Comprehensions, and what they share with loops: taking one element after the other."""

import ast

from auditor.ir.builder import End
from auditor.ir.conditions import called_name
from auditor.ir.decisions import DecisionLowering
from auditor.ir.ops import Constant, Edge, Make, Move, Next, Path, Store
from auditor.source.nodes import walk

CHOOSING = {"islice": 0, "sample": 0, "nlargest": 1, "nsmallest": 1}
"""Functions that choose some of a list, by which argument that is; the other one says how many."""


class IterationLowering(DecisionLowering):
    """Lowers comprehensions and the heads of loops."""

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
            for name in walk(generator.target)
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
        source, table = self.value(generator.iter), self.table_behind(generator.iter)
        self._renamed.append(names)
        head, exits = self.loop_head(
            generator.target,
            source,
            generator.is_async,
            part=part_of(generator.iter),
            table=table,
        )
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
        self,
        target: ast.expr,
        source: Path,
        is_async: int | bool,
        counted: bool = False,
        part: str = "",
        turns: bool = False,
        table: Path | None = None,
    ) -> tuple[int, list[End]]:
        """Emits the `Next` of a loop; returns it and the ends on which the loop is exhausted."""
        element = self.builder.temporary() if not isinstance(target, ast.Name) else (self.root(target.id),)
        op = Next(target, element, table or source, counted, part, turns, keys=table is not None)
        if is_async:
            head = self.builder.emit_interruptible(op, Edge.CANCEL)
        else:
            head = self.builder.emit(op)
        self.builder.ends = [(head, Edge.BODY)]
        if not isinstance(target, ast.Name):
            self.assign(target, element)
        return head, [(head, Edge.EXHAUSTED)]


def part_of(over: ast.expr) -> str:
    """The text of the slice that a loop goes over; empty where it goes over all."""
    if isinstance(over, ast.Subscript) and isinstance(over.slice, ast.Slice):
        return ast.unparse(over.slice)
    match over:
        case ast.Call(
            func=ast.Name(id="range"), args=[first, ast.Call(func=ast.Name(id="len"), args=[ast.Name()])]
        ):
            return f"{ast.unparse(first)}:"
    return ""


def portion_of(value: ast.expr) -> str:
    """The text of the slice, number, name or mask by which some of a list is taken; empty for all.
    `islice(blocks, n)`, `random.sample(blocks, n)` and `nlargest(n, blocks)` take as many as `blocks[:n]`."""
    if isinstance(value, ast.Call) and (name := called_name(value)) in CHOOSING and len(value.args) == 2:
        return f":{ast.unparse(value.args[1 - CHOOSING[name]])}"
    if isinstance(value, ast.Call) and called_name(value) == "islice" and 2 <= len(value.args) <= 4:
        return ast.unparse(ast.Slice(*value.args[1:] if value.args[2:] else (None, value.args[1])))
    if not isinstance(value, ast.Subscript):
        return ""
    at = value.slice.operand if isinstance(value.slice, ast.UnaryOp) else value.slice
    parted = isinstance(at, ast.Slice | ast.Compare | ast.Name) or is_one(at)
    return ast.unparse(value.slice) if parted else ""


def is_one(at: ast.expr) -> bool:
    """A number, or the first of some keys: `staged[groups[0]]`."""
    match at:
        case ast.Constant(value=each):
            return isinstance(each, int)
        case ast.UnaryOp(operand=inner) | ast.Subscript(value=ast.Name(), slice=inner):
            return is_one(inner)
    return False
