"""Slots of a table that are emptied once what lay there has a name: `entry = self.slots[i]` and
`self.slots[i] = None`."""

from collections.abc import Sequence

from auditor.ir.ops import Constant, Move, Op, Path, Store


def emptied_slots(ops: Sequence[Op]) -> frozenset[int]:
    """The stores that do so, by their number."""
    nothing = {op.target for op in ops if isinstance(op, Constant) and op.value is None}
    named: set[tuple[Path, str]] = set()
    found: set[int] = set()
    for number, op in enumerate(ops):
        match op:
            case Move(source=(_, _, *_) as source, part=part) if part:
                named.add((tuple(source), part))
            case Store(target=target, source=source, key=key) if key and source in nothing:
                if (target, "".join(key)) in named:
                    found.add(number)
    return frozenset(found)
