"""What a method of a pool takes by a helper and puts into the store by hand: `self._free.append(slot)`."""

from collections.abc import Iterable

from auditor.flow.held import Endings
from auditor.ir.ops import ANY_ITEM
from auditor.project.code.modules import Function
from auditor.project.shapes.field_work import field_work


def puts_back(function: Function, takers: Iterable[Function], endings: Endings) -> bool:
    """On one of its ways, into a field out of which what it asked takes: then it answers for its other ways,
    whoever keeps the books."""
    if function.owner is None or not endings.stored:
        return False
    taken = {name for taker in takers for name, _ in field_work(taker).taken}
    stores = {(function.owner, f".{name}", ANY_ITEM) for name in taken}
    return not stores.isdisjoint(endings.stored.values())
