"""Which part of a tuple is the lease: `tag, body = channel.pull()`, and `channel.ack(tag)`."""

from collections.abc import Iterable
from dataclasses import replace

from auditor.flow.effects import Handle
from auditor.project.code.class_model import ClassModel
from auditor.project.pools.bodies import returns_tuples
from auditor.project.pools.halves import Half, Pair
from auditor.project.pools.used_together import Told, told_of


def with_parts(model: ClassModel, pair: Pair) -> Pair:
    """As most of those tell the ends who ask for both in one function."""
    return replace(pair, acquires=tuple(_with_part(model, half, pair) for half in pair.acquires))


def _with_part(model: ClassModel, half: Half, pair: Pair) -> Half:
    if half.part is not None or not returns_tuples(half.function):
        return half
    told = (told_of(model, half.function, end.function) for end in pair.releases)
    return replace(half, part=part_lent(half, told))


def part_lent(half: Half, told: Iterable[Told | None]) -> int | None:
    """`node` of `node, used = tree.match(key)`, if that is what they give back."""
    if half.handle is not Handle.RESULT or not returns_tuples(half.function):
        return None
    parts = {each.part for each in told if each is not None and each.handle is Handle.RESULT}
    return parts.pop() if len(parts) == 1 else None
