"""Assignments: which places hold a value afterwards."""

import ast
from collections.abc import Sequence

from auditor.ir.conditions import condition, item_component
from auditor.ir.expressions import ExpressionLowering
from auditor.ir.iterations import portion_of
from auditor.ir.ops import ANY_ITEM, Constant, Define, Delete, InPlace, Make, Move, Path, Store, Unpack
from auditor.source.nodes import walk


class AssignmentLowering(ExpressionLowering):
    """Lowers assignments and `del`."""

    _pending_define: Define | None = None

    def do_Assign(self, node: ast.Assign) -> None:
        if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            self._define_flag(node.targets[0], node.value)
        if self._assign_simply(node):
            return
        source = self.value(node.value)
        for target in node.targets:
            self.assign(target, source, portion_of(node.value))
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
        """All values first, then all names: `a, b = b, a` swaps. What a name means that none before it in the
        row binds needs no other: in `cell.next, head = head, cell` the head is the cell with all it has."""
        sources = []
        for index, element in enumerate(value.elts):
            source = self.value(element)
            unbound = isinstance(element, ast.Name) and element.id not in _bound(target.elts[:index])
            if source[0][0] != "%" and not unbound:
                held = self.builder.temporary()
                self.builder.emit(Move(element, held, source, portion_of(element)))
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
            self.assign(node.target, self.value(node.value), portion_of(node.value))
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
        key = asked.key
        if asked.kind == "absent" and asked.subject is not None:
            key = f"{ast.unparse(asked.subject)} is None"  # `flag = slot == NO_SLOT` says as much of a lease
        self.graph.condition_names[key] = asked.names
        self._pending_define = Define(test, target.id, key, asked.positive != negated, asked.names)

    def assign(self, target: ast.expr, source: Path, part: str = "") -> None:
        if isinstance(target, ast.Name):
            self.builder.emit(Move(target, (self.root(target.id),), source, part))
            if self._pending_define is not None:
                self.builder.emit(self._pending_define)
                self._pending_define = None
        elif isinstance(target, ast.Attribute):
            self.builder.emit(
                Store(target, (*self.value(target.value), "." + target.attr), source, part=part)
            )
        elif isinstance(target, ast.Subscript):
            self._assign_item(target, source, part)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, source)
        elif isinstance(target, (ast.Tuple, ast.List)):
            self._unpack(target, source, part)

    def _assign_item(self, target: ast.Subscript, source: Path, part: str) -> None:
        base = self.value(target.value)
        sliced = isinstance(target.slice, (ast.Slice, ast.Tuple)) or (
            isinstance(target.slice, ast.Constant) and target.slice.value is ...
        )
        if sliced:
            self._slice_uses(target.slice)
            self.builder.emit(Store(target, (*base, "[:]"), source, sliced=True, part=part))
            return
        if not isinstance(target.slice, (ast.Constant, ast.Name)):
            self.value(target.slice)
        key = self.value(target.slice) if isinstance(target.slice, ast.Name) else ()
        self.builder.emit(Store(target, (*base, item_component(target.slice)), source, part=part, key=key))

    def _unpack(self, target: ast.Tuple | ast.List, source: Path, part: str) -> None:
        plain = not any(isinstance(element, ast.Starred) for element in target.elts)
        pieces: list[tuple[str, Path]] = []
        deferred: list[tuple[ast.expr, Path]] = []
        for index, element in enumerate(target.elts):
            inner = element.value if isinstance(element, ast.Starred) else element
            path = (self.root(inner.id),) if isinstance(inner, ast.Name) else self.builder.temporary()
            pieces.append((f"[{index}]" if plain else ANY_ITEM, path))
            if not isinstance(inner, ast.Name):
                deferred.append((inner, path))
        self.builder.emit(Unpack(target, tuple(pieces), source, part))
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


def _bound(targets: Sequence[ast.expr]) -> set[str]:
    inside = (each for target in targets for each in walk(target))
    return {each.id for each in inside if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
