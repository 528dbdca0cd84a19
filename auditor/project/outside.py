"""What calls do that lead out of the project: tables of the library and of tensors decide, then the name."""

import ast

from auditor.flow.effects import (
    BORROWED,
    PERHAPS_SAME,
    RELEASED,
    SAME,
    TAKEN,
    UNKNOWN,
    Acquisition,
    Position,
    Treatment,
    Value,
)
from auditor.ir.ops import ANY_ITEM, Call, Path
from auditor.project import library
from auditor.project.modules import Function
from auditor.project.recognise import Recogniser
from auditor.protocols.tensor_operations import treatment_of
from auditor.protocols.vocabulary import KEEPING, STORING


class OutsideEffects:
    """Answers for calls of one function that no function of the project is known to receive."""

    def __init__(self, function: Function, recogniser: Recogniser) -> None:
        self.function = function
        self.recogniser = recogniser
        self._receivers: frozenset[Path] | None = None

    def acquisition(self, call: Call) -> Acquisition | None:
        """The lease that a call starts."""
        return self.recogniser.acquisition(self.function, call)

    def outside(
        self, call: Call, dotted: str | None, position: Position, rest: Path, value: Value
    ) -> Treatment:
        """What such a call does to an operand; `dotted` is its full name where that is known."""
        for found in (
            library.container_method(call, position, rest),
            library.stored_by_method(call, position, rest),
            library.function(call, position, rest)
            if call.receiver is None
            or dotted is not None
            or call.method in library.GIVING_BACK | library.CHAINING
            else None,
        ):
            if found is not None:
                return found
        if dotted is not None and (found := library.of_paths(dotted, position, rest)) is not None:
            return found
        if self.recogniser.releases_by_name(call.at, position, value):
            return RELEASED
        if position == -1:
            return self._own_method(call, rest, value)
        if call.method in COPYING and call.receiver is not None and value is Value.OBJECT:
            return BORROWED  # `output.copy(region)` reads the region
        if call.method == "run_in_executor" and position == 0:
            return BORROWED  # it runs the work, it is not the work
        if call.method in STORING or KEEPING.match(call.method):
            return TAKEN
        if call.method in library.BORROWING:
            return BORROWED
        return self._unknown_function(call, dotted, position, rest, value)

    def _own_method(self, call: Call, rest: Path, value: Value) -> Treatment:
        """A method of the lease itself, or of an object that holds it."""
        if call.receiver is None:
            return BORROWED
        if rest:
            return PERHAPS_SAME
        table = treatment_of(call.method)
        if value is Value.INDEX:
            return _carried(call.method, table)
        if value is Value.TENSOR:
            return table if table is not None else PERHAPS_SAME
        if call.method in CONTENT and not (call.args or call.kwargs):
            return SAME
        return SAME if table == SAME or call.method in ITSELF else BORROWED

    def _unknown_function(
        self, call: Call, dotted: str | None, position: Position, rest: Path, value: Value
    ) -> Treatment:
        if call.receiver is not None and call.receiver in self._pools():
            return BORROWED  # the pool's own method, and none that its protocol lists
        known_torch = dotted is not None and dotted.split(".")[0] in ("torch", "numpy", "math", "triton")
        table = treatment_of(call.method)
        if value is Value.INDEX and call.method == "copy_" and call.receiver is not None:
            return Treatment(moved_to=call.receiver)
        if value is Value.INDEX and table is not None:
            return _carried(call.method, table)
        if position == "out":
            return SAME
        if value is Value.OBJECT and known_torch and call.method in ARRAYS:
            return SAME  # only numbers can be put into a tensor: what was handed out were numbers
        if table is not None and (value is Value.TENSOR or known_torch):
            as_function = call.receiver is None or known_torch or dotted is not None
            return table if position == 0 and as_function else BORROWED
        if call.method[:1].isupper() and call.method != call.method.upper():
            return Treatment(result=(ANY_ITEM, *rest)) if not known_torch else BORROWED
        if value is Value.TENSOR and not rest:
            return BORROWED if known_torch or self._is_module_call(call) else PERHAPS_SAME
        if value is Value.INDEX:
            return PERHAPS_SAME if known_torch else UNKNOWN
        return BORROWED if dotted is not None else UNKNOWN  # a function of a library, known by name, borrows

    def _pools(self) -> frozenset[Path]:
        """Receivers of this function's acquires."""
        if self._receivers is None:
            self._receivers = frozenset()
            self._receivers = frozenset(
                op.receiver
                for op in self.function.graph.ops
                if isinstance(op, Call) and op.receiver is not None and self.acquisition(op) is not None
            )
        return self._receivers

    def _is_module_call(self, call: Call) -> bool:
        """`self.proj(x)`: an nn.Module from elsewhere makes a new tensor."""
        owner = call.at.func
        if not isinstance(owner, ast.Attribute):
            return False
        held = self.recogniser.calls.model.type_of(self.function, owner)
        return isinstance(held, str) and ".nn." in held


ITSELF = frozenset({"copy", "__enter__", "__iter__", "resolve", "absolute"})
"""Methods of an object that return it, or another name of the same path."""

COPYING = frozenset({"copy", "copy_from", "copyto", "copy_into"})

CONTENT = frozenset({"get", "unwrap"})
"""Methods that take out of an outcome what it stands for: `status.get()`."""

ARRAYS = frozenset({"tensor", "as_tensor", "asarray", "array", "LongTensor", "IntTensor"})
CARRIERS = frozenset({"item", "tensor", "as_tensor", "asarray", "array", "from_numpy", "cat", "concat",
                      "concatenate", "stack", "clone", "contiguous", "to", "tolist", "copy", "long", "int",
                      "cpu",
                      "cuda", "unique", "sort", "flip", "repeat_interleave", "pin_memory", "type", "roll",
                      "hstack"})  # fmt: skip


def _carried(name: str, table: Treatment | None) -> Treatment:
    """Slot numbers keep the obligation through copies and rearrangements, not through sums and sizes."""
    if table == SAME or name in CARRIERS:
        return SAME
    return BORROWED if table is not None else PERHAPS_SAME
