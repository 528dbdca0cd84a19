"""A lease that autograd keeps: it entered an operation that needs it for backward, and the result lives on.

What is followed beside the lease's names: whether it needs a gradient itself, which results hold a graph that
keeps it, and the contexts that switch recording off."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace

from auditor.flow.aliases import Named, inside
from auditor.flow.effects import Value
from auditor.flow.holders import bound, held_in, moved
from auditor.flow.leaves import Leaves
from auditor.flow.misuse import Uses
from auditor.flow.operands import operands
from auditor.flow.until_release import UntilRelease
from auditor.flow.unwritten import is_method
from auditor.ir.graph import Graph
from auditor.ir.ops import RAISING, Call, Edge, Enter, Exit, Fresh, InPlace, Leave, Op, Path, Store
from auditor.protocols.tensor_accesses import carries_gradient, keeps, module_keeps_input

OFF = frozenset({"no_grad", "inference_mode", "_no_grad"})


@dataclass(frozen=True, slots=True)
class Recorded(Named):
    """`graphs` are places of results that keep it; `itself` that its own history does; `modes` contexts
    that switch recording."""

    needs: bool = False
    graphs: frozenset[Path] = frozenset()
    itself: bool = False
    modes: tuple[tuple[Path, bool], ...] = ()

    @property
    def recording(self) -> bool:
        return self.modes[-1][1] if self.modes else True


class Recording(UntilRelease):
    """The step function. `kept` are releases at which a graph still keeps the lease."""

    def __init__(
        self, graph: Graph, uses: Uses, leaves: Leaves, protocol: str, exits: Path | None = None
    ) -> None:
        super().__init__(graph, uses, protocol, exits)
        self.leaves = leaves
        self.kept: list[tuple[int, Recorded]] = []
        self.saved_at: dict[int, str] = {}

    def step(self, node: int, state: Recorded, edge: Edge) -> tuple[Recorded, ...]:
        op = self.graph.ops[node]
        if isinstance(op, Leave):
            return ()
        if self._releases(op, state):
            if state.graphs and edge not in RAISING and (node, state) not in self.kept:
                self.kept.append((node, state))
            return ()
        if edge in RAISING:
            return (state,)
        state = self._mode(op, state)
        result = self._result(node, op, state)
        after = self.aliases.after(node, op, state, edge)
        if after is None:
            return ()
        graphs = moved(state.graphs, op)
        target = getattr(op, "target", None)
        if isinstance(op, (Call, Fresh)) and target is not None:
            graphs = bound(graphs, target, False)
        after = replace(after, graphs=graphs | result, needs=state.needs or self._filled(op, state))
        if isinstance(op, Call) and _ends_graphs(op):
            after = replace(after, graphs=frozenset(), itself=False)
        if isinstance(op, (Call, InPlace)) and self._over_itself(op, after):
            after = replace(after, itself=True)
        return (after,) if after.aliases else ()

    def _mode(self, op: Op, state: Recorded) -> Recorded:
        """Contexts that switch recording off or on."""
        if isinstance(op, Exit):
            return replace(state, modes=tuple(m for m in state.modes if m[0] != op.context))
        at = op.at if isinstance(op, (Enter, Call)) else None
        if not isinstance(at, ast.Call):
            return state
        name = at.func.attr if isinstance(at.func, ast.Attribute) else getattr(at.func, "id", "")
        on = switches(name, at)
        if on is None:
            return state
        if isinstance(op, Enter):
            return replace(state, modes=(*state.modes, (op.context, on)))
        if name == "set_grad_enabled" and isinstance(op, Call) and not op.entered:
            return replace(state, modes=(*state.modes, (("%grad",), on)))
        return state

    # What is computed from it -------------------------------------------------------------------------------

    def _result(self, node: int, op: Op, state: Recorded) -> frozenset[Path]:
        """Places that hold a graph after the operation because of what it was given."""
        if not state.recording:
            return frozenset()
        match op:
            case Fresh(at=ast.BinOp(left=left, op=operator), target=target, uses=uses):
                by_number = isinstance(left, ast.Constant)  # `1 / work` and `2 ** work` keep their results
                saves = self._saves(node, type(operator).__name__, list(uses), state) and not by_number
                return frozenset({target}) if saves or self._led_to(list(uses), state) else frozenset()
            case Fresh(at=ast.UnaryOp(op=ast.USub()), target=target, uses=uses):
                return frozenset({target}) if self._led_to(list(uses), state) else frozenset()
            case InPlace(at=ast.AugAssign(op=operator), target=target, operand=operand):
                saves = self._saves(node, type(operator).__name__, [target, operand], state, in_place=True)
                return frozenset({target[:1]}) if saves or self._led_to([operand], state) else frozenset()
            case Store(sliced=False) | Store():
                return frozenset()
            case Call():
                return self._called(node, op, state)
        return frozenset()

    def _called(self, node: int, call: Call, state: Recorded) -> frozenset[Path]:
        if call.is_told_where:
            return frozenset()  # torch refuses to record what it writes into a tensor that it is given
        paths = self._tensor_operands(call)
        in_place = call.method.endswith("_") and not call.method.endswith("__")
        saves = self._saves(node, call.method, paths, state, in_place=in_place)
        module = self.uses.module_class(call)
        if module is not None and module_keeps_input(module):
            saves = saves or any(self._is(path, state) for path in paths)
            if saves:
                self.saved_at.setdefault(node, module)
        found = set(self._gathered(call, state))
        if saves or (self._led_to(paths, state) and carries_gradient(call.method)):
            found.add(call.target)
            if in_place and call.receiver is not None and not self._is(call.receiver, state):
                found.add(call.receiver)
        return frozenset(found)

    def _gathered(self, call: Call, state: Recorded) -> Iterator[Path]:
        """Lists that a result with a graph is put into: `outputs.append(work @ weight)`."""
        for position, operand in operands(call):
            if held_in(state.graphs, operand):
                treatment = self.aliases.treatment(call, position, ())
                if treatment.moved_to is not None:
                    yield treatment.moved_to[:-1]

    def _tensor_operands(self, call: Call) -> list[Path]:
        """In the order of the operation's own operands: the receiver first, unless that is a module such as
        `torch`."""
        method = is_method(call) and self.uses.module_class(call) is None
        return [path for position, path in operands(call) if method or position != -1]

    def _saves(
        self, node: int, name: str, paths: list[Path], state: Recorded, *, in_place: bool = False
    ) -> bool:
        if not any(self._is(path, state) for path in paths):
            return False
        needing = [i for i, path in enumerate(paths) if self._needs(path, state)]
        for index, path in enumerate(paths):
            if not self._is(path, state) or not keeps(name, index, needing):
                continue
            if in_place and index == 0:
                continue  # torch keeps a copy of what it overwrites
            self.saved_at.setdefault(node, name)
            return True
        return False

    def _needs(self, path: Path, state: Recorded) -> bool:
        return state.needs if self._is(path, state) else self.leaves.may_need(path)

    def _is(self, path: Path, state: Recorded) -> bool:
        found = inside(state.aliases, path, Value.TENSOR)
        return found is not None and found[0] == ()

    def _led_to(self, paths: list[Path], state: Recorded) -> bool:
        return any(held_in(state.graphs, path) or (state.itself and self._is(path, state)) for path in paths)

    def _over_itself(self, op: Call | InPlace, state: Recorded) -> bool:
        """`work.exp_()` keeps its result, which is the lease."""
        if isinstance(op, InPlace) or op.receiver is None or not state.needs or not state.recording:
            return False
        return (
            self._is(op.receiver, state)
            and op.method.endswith("_")
            and keeps(op.method, 0, [0])
            and (not keeps(op.method, 1, [0]))
        )

    def _filled(self, op: Op, state: Recorded) -> bool:
        """Whether the operation writes something into the lease that a gradient may be wanted for."""
        if not state.recording:
            return False
        match op:
            case Call(receiver=receiver) if receiver is not None and op.method.endswith("_"):
                given = [path for position, path in operands(op) if position != -1]
                return self._is(receiver, state) and any(self._needs(path, state) for path in given)
            case InPlace(target=target, operand=operand):
                return self._is(target, state) and self._needs(operand, state)
            case Store(target=target, source=source) if len(target) > 1 and target[-1].startswith("["):
                return self._is(target[:-1], state) and self._needs(source, state)
        return False


def switches(name: str, call: ast.Call) -> bool | None:
    """Whether recording is on after it; None where the call has nothing to do with that."""
    if name in OFF:
        wanted = call.args[0] if call.args else None
        return isinstance(wanted, ast.Constant) and wanted.value is False
    if name == "enable_grad":
        return True
    if name == "set_grad_enabled":
        return bool(call.args) and isinstance(call.args[0], ast.Constant) and call.args[0].value is True
    return None


def _ends_graphs(call: Call) -> bool:
    """A backward pass frees what it used."""
    keeping = any(
        key.arg in ("retain_graph", "create_graph")
        and not (isinstance(key.value, ast.Constant) and not key.value.value)
        for key in call.at.keywords
    )
    is_grad = call.method == "grad" and call.receiver is not None and call.receiver[-1].endswith("autograd")
    return not keeping and (call.method == "backward" or is_grad)
