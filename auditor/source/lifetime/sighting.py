"""The data of this package: one place where something may outlive its use, and what kind of place it is."""

from dataclasses import dataclass
from enum import StrEnum

from auditor.model import Span, Step


class Kind(StrEnum):
    """What was seen; one rule speaks of each."""

    GRAPH_KEPT = "graph kept"
    STATE_CARRIED = "state carried"
    HOOK_DROPPED = "hook dropped"
    OBJECT_CACHED = "object cached"
    EXCEPTION_HELD = "exception held"
    TENSOR_ON_CONTEXT = "tensor on context"
    GRAPH_RETAINED = "graph retained"
    SHAPES_CACHED = "shapes cached"
    HOOK_CLOSED = "hook closed over its owner"
    RECORDING_ON = "recording left on"
    CACHE_EMPTIED = "cache emptied"
    GRADIENTS_ON = "gradients on"
    UNWRITTEN = "memory read before it is written"
    CACHE_WRAPPED = "functools' cache under another name"  # no fault: what others need to be one


@dataclass(frozen=True, slots=True)
class Sighting:
    """`what` is the thing kept, `where` what keeps it, both as the code names them; `how` tells the cases
    of one kind apart. `needs` is the dotted name of a function of the project that has to be a cache for
    this to be a fault.
    """

    kind: Kind
    span: Span
    symbol: str
    what: str
    where: str = ""
    how: str = ""
    steps: tuple[Step, ...] = ()
    needs: str = ""
