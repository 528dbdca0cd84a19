"""Where the handles of unfinished transfers are: who waits for one has not waited for the others."""

import ast
import re

from auditor.flow.holders import bound, held_in, moved
from auditor.ir.ops import ANY_ITEM, Await, Call, Make, Move, Op, Path

Handles = frozenset[tuple[int, Path]]
"""The node that began a transfer, and a place of its handle."""

NUMBER = re.compile(r"\[(-?)\d+\]")
GATHERING = frozenset({"append", "extend", "insert", "appendleft"})


def places_of(handles: Handles) -> frozenset[Path]:
    return frozenset(place for _, place in handles)


def followed(handles: Handles, op: Op) -> Handles:
    """The places after an operation that waits for nothing."""
    if not handles:
        return handles
    nodes = sorted({node for node, _ in handles})
    return frozenset((node, place) for node in nodes for place in _after(_of(handles, node), op))


def waited_for(handles: Handles, receiver: Path) -> frozenset[int]:
    """The transfers that surely, or for all that can be told, have ended when `receiver.wait()` returns."""
    found = frozenset(node for node, _ in handles if _means(_of(handles, node), receiver))
    alike = [node for node in found if (*receiver[:-1], ANY_ITEM) in _of(handles, node)]
    if len(alike) > 1 and NUMBER.fullmatch(receiver[-1]):  # one item of a list that several were put into
        return frozenset({max(alike) if receiver[-1] == "[-1]" else min(alike)})
    return found


def _of(handles: Handles, node: int) -> frozenset[Path]:
    return frozenset(place for each, place in handles if each == node)


def _after(places: frozenset[Path], op: Op) -> frozenset[Path]:
    match op:
        case Move(target=target, source=source) | Await(target=target, source=source) if target != source:
            inside = {(*target, *place[len(source) :]) for place in places if place[: len(source)] == source}
            return bound(places, target, not inside and held_in(places, source)) | inside
        case Make(target=target, items=items) if _is_display(op.at):
            kept = bound(places, target, False)
            count = len(items)
            held = [index for index, (_, path) in enumerate(items) if held_in(places, path)]
            return kept | {(*target, f"[{number}]") for index in held for number in (index, index - count)}
        case Call(method=method, receiver=receiver) if receiver is not None and method in GATHERING:
            given = any(held_in(places, path) for path, *_ in op.args)
            return bound(places, op.target, False) | ({(*receiver, ANY_ITEM)} if given else set())
        case Call():
            return bound(places, op.target, False)
    return moved(places, op)


def _is_display(at: ast.AST) -> bool:
    """`[one, other]`: what stands where is written there."""
    return isinstance(at, (ast.List, ast.Tuple)) and not any(isinstance(e, ast.Starred) for e in at.elts)


def _means(places: frozenset[Path], receiver: Path) -> bool:
    for place in places:
        pairs = list(zip(place, receiver, strict=False))
        if all(a == b or _may_be(a, b) for a, b in pairs):
            return True
        if all(a == b or _may_be(a, b) or _counted_otherwise(a, b) for a, b in pairs):
            other = {p for p in places if p[:-1] == place[:-1] and p != place}
            if not other:
                return True  # from which end it was counted differs, and the length is not known
    return False


def _may_be(one: str, other: str) -> bool:
    return one[0] == other[0] == "[" and not (NUMBER.fullmatch(one) and NUMBER.fullmatch(other))


def _counted_otherwise(one: str, other: str) -> bool:
    first, second = NUMBER.fullmatch(one), NUMBER.fullmatch(other)
    return first is not None and second is not None and first[1] != second[1]
