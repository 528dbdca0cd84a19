"""Which part of a tuple is the lease: `tag, body = channel.pull()`, and `channel.ack(tag)`."""

from dataclasses import replace

from auditor.flow.effects import Handle
from auditor.project.code.class_model import ClassModel
from auditor.project.pools.bodies import returns_tuples
from auditor.project.pools.halves import Half, Pair
from auditor.project.pools.used_together import told_of


def with_parts(model: ClassModel, pair: Pair) -> Pair:
    """As most of those tell the ends who ask for both in one function."""
    return replace(pair, acquires=tuple(_with_part(model, half, pair) for half in pair.acquires))


def _with_part(model: ClassModel, half: Half, pair: Pair) -> Half:
    if half.handle is not Handle.RESULT or half.part is not None or not returns_tuples(half.function):
        return half
    told = {told_of(model, half.function, end.function) for end in pair.releases}
    parts = {each.part for each in told if each is not None and each.handle is Handle.RESULT}
    return replace(half, part=parts.pop()) if len(parts) == 1 else half
