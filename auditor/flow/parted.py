"""Lists of leases of which a part is given back: `pool.free(blocks[:n])`, and the rest is named no more."""

import ast
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from auditor.flow.assuming import Assuming
from auditor.flow.cut_short import cuts_short
from auditor.flow.effects import Fate, Position, Value
from auditor.flow.held import Held
from auditor.flow.lease import Loss
from auditor.flow.operands import operands
from auditor.flow.places import below
from auditor.ir.ops import (
    ANY_ITEM,
    Await,
    Call,
    Capture,
    Constant,
    Edge,
    Fresh,
    InPlace,
    Lookup,
    Make,
    Move,
    Next,
    Op,
    Path,
    Store,
    Unpack,
    Yield,
)


class Parted(Assuming):
    """A list that was acquired here, and that nobody else has, as far as it is parted."""

    def _gives_a_part(self, call: Call, held: Held) -> bool:
        """`pool.free(blocks[:n])`."""
        value, protocol = self.acquisition.value, self.acquisition.protocol
        if not self._may_be_parted(held):
            return False
        return any(
            self.effects.treatment(call, position, (), value, protocol).fate is Fate.RELEASE
            for position in parts_given(call, held.places, self.graph.ops[self.site].at)
        )

    def _left_out(self, node: int, op: Op, held: Held, edge: Edge) -> Held | None:
        """`for block in blocks[1:]`: behind the loop it may be the one that the loop does not go over."""
        if self._may_be_parted(held) and not held.parted and cuts_short(self.graph, node, held):
            return self._behind_the_cut(node, op, held)
        if not isinstance(op, Next) or edge is not Edge.EXHAUSTED or held.parted or node in held.seen:
            return None
        if not _leaves_one(op.part) or not self._may_be_parted(held):
            return None
        whole = (*op.source, ANY_ITEM)
        others = (place for place in held.places if "~" not in place[0] and place != op.target)
        return replace(held, parted=True) if all(below(place, whole) == () for place in others) else None

    def _behind_the_cut(self, node: int, op: Op, held: Held) -> Held | None:
        if isinstance(op, Move) and op.target != op.source[:1]:
            return replace(held, parted=True)
        self._lose(Loss.DROPPED, node, held)
        return None

    def _one_of(self, op: Unpack, held: Held) -> list[Held]:
        """`first, second = acquire_two()`: one of the list's leases gets one of the names."""
        element = (*op.source, ANY_ITEM)
        if not self._is_a_list(op.source):
            return []
        plain = all(component != ANY_ITEM and len(target) == 1 for component, target in op.targets)
        if not plain or element not in held.places or not self._may_be_parted(held):
            return []
        targets = {target for _, target in op.targets}
        kept = frozenset(place for place in held.places if place[:1] not in targets)
        return [replace(held, places=kept | {target}) for target in sorted(targets)]

    def _copies_into_another(self, op: Store, held: Held) -> bool:
        """`bigger[:used] = block[:used]`, both of this pool: what is written in it, not the block."""
        whole = op.source[:-1] if op.source[-1] == "[:]" else op.source
        return whole in held.places and op.target[:1] in self._of_the_same_pool

    @cached_property
    def _of_the_same_pool(self) -> frozenset[Path]:
        """What this function's acquires from it are called."""
        protocol = self.acquisition.protocol
        calls = [op for op in self.graph.ops if isinstance(op, Call)]
        asked = {op.target: self.effects.acquisition(op) for op in calls}
        names = {target for target, found in asked.items() if found and found.protocol == protocol}
        for op in self.graph.ops:
            if isinstance(op, Move | Await) and op.source in names:
                names.add(op.target)
        return frozenset(names)

    def _is_a_list(self, path: Path) -> bool:
        """Made here, or by the acquire: of `key, lease = table.popitem()` one is no lease."""
        seen, pending = {path}, [path]
        while pending:
            made = pending.pop()
            for node, op in enumerate(self.graph.ops):
                if (
                    getattr(op, "target", None) != made
                    or isinstance(op, Make | Constant)
                    or node == self.site
                ):
                    continue
                if not isinstance(op, Move | Await):
                    return False
                if op.source not in seen:
                    seen.add(op.source)
                    pending.append(op.source)
        return True

    def _may_be_parted(self, held: Held) -> bool:
        lent_here = self.site >= 0 and self.acquisition.value is not Value.TENSOR
        return lent_here and not any(map(self._outlives, held.places))


def _leaves_one(part: str) -> bool:
    """All but the first, or all but the last: `1:`, `:-1`; of `2:` it is not said that there are two."""
    return part in ("1:", ":-1")


def parts_given(call: Call, lists: frozenset[Path], acquire: ast.AST) -> Iterator[Position]:
    """The operands that are slices of one of these lists and leave something; `blocks[:n]` of `allocate(n)`
    is all of it."""
    for position, operand in operands(call):
        if operand[-1] == "[:]" and operand[:-1] in lists and _is_a_part(call, position, acquire):
            yield position


def _is_a_part(call: Call, position: Position, acquire: ast.AST) -> bool:
    given = (
        call.at.args[position] if isinstance(position, int) and 0 <= position < len(call.at.args) else None
    )
    match given:
        case ast.Subscript(slice=ast.Slice(lower=lower, upper=upper, step=None)):
            bounds = [bound for bound in (lower, upper) if bound is not None]
            return bool(bounds) and not any(_is_an_end(bound, acquire) for bound in bounds)
    return False


def _is_an_end(bound: ast.expr, acquire: ast.AST) -> bool:
    """`blocks[0:]`, `blocks[:len(blocks)]`, or what the acquire was told."""
    if isinstance(bound, ast.Constant) and bound.value in (0, None):
        return True
    if any(isinstance(inner, ast.Call) for inner in ast.walk(bound)):
        return True
    written = ast.dump(bound)
    return any(ast.dump(inner) == written for inner in ast.walk(acquire))


def uses(op: Op) -> Iterator[Path]:
    """What an operation reads."""
    match op:
        case Call():
            yield from (path for _, path in operands(op))
        case Move(source=source) | Await(source=source) | Unpack(source=source) | Store(source=source):
            yield source
        case Next(source=source):
            yield source
        case InPlace(operand=operand):
            yield operand
        case Make(items=items):
            yield from (path for _, path in items)
        case Fresh(uses=used):
            yield from used
        case Lookup(target=target):
            yield target
        case Capture(names=names):
            yield from ((name,) for name in names)
        case Yield(source=source) if source is not None:
            yield source
