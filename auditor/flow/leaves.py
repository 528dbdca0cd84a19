"""Names that a gradient may be wanted for; numbers, fresh constants and detached tensors are none."""

import ast
from collections.abc import Callable, Iterator

from auditor.flow.misuse import Uses
from auditor.flow.operands import operands
from auditor.flow.places import METADATA
from auditor.ir.graph import Graph
from auditor.ir.ops import Await, Call, Constant, Fresh, InPlace, Make, Move, Next, Op, Path, Store, Unpack
from auditor.protocols.tensor_accesses import carries_gradient, makes_leaf

NeedsGradient = Callable[[Path], bool]


class Leaves:
    """`needs(path)` asks of parameters and attributes whether they may be trained or carry a gradient."""

    def __init__(self, graph: Graph, uses: Uses, needs: NeedsGradient) -> None:
        self.uses = uses
        self._needs = needs
        self.needing: set[str] = set()
        bindings = [(root, op) for op in graph.ops for root in _written(op)]
        while True:
            more = {root for root, op in bindings if root not in self.needing and self._brings(op)}
            if not more:
                return
            self.needing |= more

    def may_need(self, path: Path) -> bool:
        """Whether a gradient may be wanted for what is at `path`."""
        if any(piece in METADATA or piece == ".data" for piece in path[1:]):
            return False
        root = path[0]
        return root in self.needing or (not root.startswith("%") and self._needs(path))

    def _brings(self, op: Op) -> bool:
        """Whether what the operation writes may need a gradient."""
        match op:
            case Move(source=source) | Await(source=source) | Unpack(source=source) | Store(source=source):
                return self.may_need(source)
            case InPlace(operand=operand):
                return self.may_need(operand)
            case Next(source=source, counted=counted):
                return not counted and self.may_need(source)
            case Make(items=items):
                return any(self.may_need(path) for _, path in items)
            case Fresh(at=ast.BinOp() | ast.UnaryOp(), uses=uses):
                return any(self.may_need(path) for path in uses)
            case Call():
                return self._returns_needing(op)
        return False

    def _returns_needing(self, call: Call) -> bool:
        asked = any(
            key.arg == "requires_grad" and not (isinstance(key.value, ast.Constant) and not key.value.value)
            for key in call.at.keywords
        )
        if asked:
            return True
        dotted = self.uses.dotted(call)
        if not carries_gradient(call.method) or (
            makes_leaf(call.method) and (dotted or "").startswith("torch.")
        ):
            return False
        if self.uses.module_class(call) is not None:
            return True
        return any(self.may_need(path) for _, path in operands(call))


def _written(op: Op) -> Iterator[str]:
    """Roots that the operation writes to."""
    match op:
        case Unpack(targets=targets):
            yield from (target[0] for _, target in targets)
        case Call():
            yield op.target[0]
            if op.receiver is not None and op.method.endswith("_") and not op.method.endswith("__"):
                yield op.receiver[0]
        case Constant():
            return
        case Move() | Await() | Store() | InPlace() | Next() | Make() | Fresh():
            yield op.target[0]
