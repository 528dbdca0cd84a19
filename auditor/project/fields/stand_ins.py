"""Leases that stand for nothing: the block that padding is written to, the slot of requests that warm up.

Their object takes one when it is made, and lives as long as the process."""

from collections.abc import Sequence

from auditor.ir.ops import Path
from auditor.project.code.modules import Function
from auditor.project.fields.forgetting import CLOSING
from auditor.project.outcome import Outcome
from auditor.protocols.vocabulary import split

BIRTH = frozenset({"__init__", "__post_init__"})

NOTHING = frozenset(
    {"dummy", "fake", "null", "pad", "padding", "padded", "placeholder", "sentinel", "filler"}
)
"""Words in the names of fields for what is there in the place of a real one."""


def stands_for_nothing(outcome: Outcome, path: Path, family: Sequence[Function]) -> bool:
    """`self.null_block = pool.take()` at birth. Who has an end, and leaves it out there, forgets it; a file
    or a socket is no place among others."""
    method = outcome.function
    if method.name not in BIRTH or len(path) != 2 or outcome.acquisition.foreign:
        return False
    if NOTHING.isdisjoint(split(path[1][1:])):
        return False
    return not any(map(_ends_its_object, family))


def _ends_its_object(method: Function) -> bool:
    """`close()`, and not `finish(request)`, which ends what it is told."""
    told = len(method.parameters) > 1 and not method.name.startswith("__")
    return CLOSING.fullmatch(method.name) is not None and not told
