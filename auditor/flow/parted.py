"""Lists of leases of which a part is taken: `pool.free(blocks[:n])`, `first = blocks[0]`, a loop that is
left.

The lease that is followed stands for any of the list. Where an operation takes some of them only, it goes on
twice: as one of those, and as one of the others, which lie where they lay (`Held.parted`). Whatever touches
them afterwards may see to them, so that this second state then says nothing more. It is lost where nothing
does. Whether a part leaves others is asked of `portions`, whether the list holds nothing else of `lists`."""

import ast
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from auditor.flow.assuming import Assuming
from auditor.flow.effects import Fate, Position, Treatment, Value
from auditor.flow.held import Held
from auditor.flow.indirect import without_contents
from auditor.flow.knowledge import EXTENDING
from auditor.flow.lease import Loss
from auditor.flow.lists import written
from auditor.flow.operands import operands, uses
from auditor.flow.places import below
from auditor.flow.portions import Portions, is_number, may_be_a_mask
from auditor.ir.iterations import CHOOSING, portion_of
from auditor.ir.ops import (
    ANY_ITEM,
    RAISING,
    TO_COME,
    Assume,
    Await,
    Call,
    Constant,
    Edge,
    InPlace,
    Make,
    Move,
    Next,
    Op,
    Path,
    Store,
    Unpack,
)

TAKING_OUT = frozenset({"pop", "popleft"})


class Parted(Assuming):
    """A list that was acquired here, and that nobody else has, as far as it is parted."""

    def _gone_by(self, op: Op, held: Held, edge: Edge) -> bool:
        """Whether the others of a parted list are somebody's business now: given back, kept, or asked for."""
        if edge in RAISING:
            return True
        if isinstance(op, Call):
            return any(self._sees_to(op, position, path, held) for position, path in operands(op))
        if any(self._about(held, path) for path in uses(op)):
            return True
        if not isinstance(op, Assume):
            return False
        asked = {place[0].lstrip("@") for place in held.places | held.maybe} & op.names
        return bool(asked) or (op.says_absent and self._is_an_element(op.subject, held))

    def _sees_to(self, call: Call, position: Position, operand: Path, held: Held) -> bool:
        """More than to look at them: `len(blocks)`."""
        if any(below(place, operand) is not None for place in without_contents(held.maybe)):
            return True
        treatments = (self._treatment(call, position, operand, place) for place in held.places)
        return any(_ends_or_moves(treatment) for treatment in treatments)

    def _is_an_element(self, subject: Path | None, held: Held) -> bool:
        """`for lane in lanes: if lane is None: break`: those behind a gap may be gaps too."""
        loops = (op for op in self.graph.ops if isinstance(op, Next))
        return any(subject in self._elements(loop) and self._goes_over(loop, held) for loop in loops)

    def _goes_over(self, loop: Next, held: Held) -> bool:
        return bool(self._copied(held, loop.target, (*loop.source, ANY_ITEM))[0])

    def _others(self, node: int, op: Op, held: Held, edge: Edge) -> Iterator[Held]:
        """The leases of the list that the operation leaves where they are."""
        if held.parted or edge in RAISING:
            return
        if isinstance(op, Next):
            left = self._left_by_loop(node, op, held, edge)
        else:
            left = any(self._divides(node, *taken, held) for taken in self._taken(op, held))
        if not left or self._shown(held):
            return
        named = written(op)
        places = frozenset(p for p in held.places if not any(p[: len(name)] == name for name in named))
        if places:
            yield replace(held, places=places, parted=True)
        else:
            self._lose(Loss.DROPPED, node, held)

    def _shown(self, held: Held) -> bool:
        """A function of which nothing is known was given the list, and taken to have borrowed it because of
        what comes later: that is not said of all its leases."""
        calls = (self.graph.ops[node] for node in self.trusting)
        given = (path for call in calls if isinstance(call, Call) for _, path in operands(call))
        return any(self._is_list_of_several(path, held) for path in given)

    def _left_by_loop(self, node: int, op: Next, held: Held, edge: Edge) -> bool:
        """By one over a part of the list those that are not in that; by the first turn, all but one."""
        if not self._goes_over(op, held) or not self._may_be_parted(held):
            return False
        if edge is Edge.EXHAUSTED and node in held.seen:
            last = op.target in held.places and not op.part  # `for slot in slots: ...`, `free(slot)`
            return last and self._is_list_of_several(_list_in(op.source), held)
        if node in held.seen:
            return False
        if edge is Edge.EXHAUSTED:
            part = bool(op.part) and self._divides(node, _list_in(op.source), op.part, True, held)
            return part or self._fewer.ends_early(op)
        if op.element is None:
            return False
        roots = {place[0] for place in held.places if place[:1] != op.target[:1] and place[0][0] != "%"}
        named = {root for root in roots if "~" not in root}
        return all(self._is_list_of_several((root,), held) for root in named or roots)

    def _taken(self, op: Op, held: Held) -> Iterator[tuple[Path, str, bool]]:
        """Lists and the parts of them that get another name, or go elsewhere; whether that says that they are
        lists, and not memory of which there is a view."""
        numbers = self.acquisition.value is Value.INDEX
        match op:
            case (
                Move(source=source, part=part)
                | Store(source=source, part=part)
                | Unpack(source=source, part=part)
            ) if part:
                yield source[:-1], part, numbers
            case InPlace(operand=operand, at=ast.AugAssign(value=value)) if part := portion_of(value):
                yield operand[:-1], part, True
            case Call(receiver=tuple() as receiver, method=method) if method in TAKING_OUT:
                if _at_an_end(op) or (*receiver, ANY_ITEM) in held.places:
                    yield receiver, "", numbers
            case Call(method=method, args=args, receiver=None | ("@itertools" | "@heapq" | "@random",)) if (
                method in CHOOSING and (part := portion_of(op.at))
            ):
                yield args[CHOOSING[method]][0], part, numbers or method != "islice"
            case Call():
                for position, operand in operands(op):
                    given = _as_written(op.at, position)
                    part = portion_of(given) if given is not None else ""
                    fate = self._goes_on(op, position, operand, held) if part else None
                    if fate is not None:
                        whole = operand[:-2] if operand[-2:] == ("[:]", ANY_ITEM) else operand[:-1]
                        yield whole, part, numbers or fate is Fate.RELEASE or op.method in EXTENDING

    def _goes_on(self, call: Call, position: Position, operand: Path, held: Held) -> Fate | None:
        """Given back, kept, or as a list in the call's result."""
        for place in held.places:
            treatment = self._treatment(call, position, operand, place)
            if treatment is None or treatment.fate is Fate.UNKNOWN:
                continue
            result = treatment.result is not None and not treatment.maybe and operand[-1] == "[:]"
            if _ends_or_moves(treatment) or result:
                return treatment.fate
        return None

    def _divides(self, node: int, whole: Path, part: str, sure: bool, held: Held) -> bool:
        """Once: a loop that takes one part after the other may come to the end."""
        lists, sure = self._lists, sure and not is_number(part)
        if not self._may_be_parted(held) or (may_be_a_mask(part) and whole in held.places):
            return False
        if part and not self._portions.leaves_some(part, whole):
            return False
        if not self._is_list_of_several(whole, held, sure) or lists.puts_there_first(node, whole, part):
            return False
        return not lists.comes_again(node, lists.made_at(whole[:1]))

    def _is_list_of_several(self, whole: Path, held: Held, sure: bool = False) -> bool:
        lists, acquisition = self._lists, self.acquisition
        if acquisition.keyed:
            return sure and whole in acquisition.places
        at_once = whole in held.places and acquisition.value is not Value.TENSOR
        at_once = at_once and not self.effects.ends_itself(acquisition.protocol)
        at_once = at_once and (sure or lists.is_gone_over(whole) or self._are_counted_off(whole))
        if not at_once and not any(place[: len(whole) + 1] == (*whole, ANY_ITEM) for place in held.places):
            return False
        at_once = at_once or any(ANY_ITEM in place for place in acquisition.places)
        return (self._portions.several() if at_once else lists.repeated) and lists.filled_here(whole)

    def _are_counted_off(self, whole: Path) -> bool:
        """`pair = blocks.alloc(2)` where `pair[0]` and `pair[1]` are worked with."""
        if self.acquisition.value is not Value.INDEX:
            return False
        told = self._portions.how_many()
        return told is not None and told > 1 and self._lists.numbers_of(whole) == set(range(told))

    @cached_property
    def _portions(self) -> Portions:
        return Portions(self.graph, self.site)

    def _apart(self, op: Unpack, held: Held) -> list[Held]:
        """A state for each name that the leases of a list get."""
        return self._one_of(op, held) or self._first_and_rest(op, held)

    def _taken_out(self, call: Call, held: Held, edge: Edge) -> list[Held]:
        """`last = slots.pop()` of several that were acquired together: that one has no other place now."""
        whole = call.receiver
        if call.method not in TAKING_OUT or edge in RAISING or held.parted or whole not in held.places:
            return []
        numbers = self.acquisition.value is Value.INDEX
        listed = _at_an_end(call) and self._may_be_parted(held)
        listed = listed and self._is_list_of_several(whole, held, numbers)
        return [replace(held, places=frozenset({call.target}))] if listed else []

    def _first_and_rest(self, op: Unpack, held: Held) -> list[Held]:
        """`first, *rest = acquire_all()`."""
        match op.at, op.targets:
            case (
                ast.Tuple(elts=[ast.Name(), ast.Starred()]) | ast.List(elts=[ast.Name(), ast.Starred()]),
                ((_, first), (_, rest)),
            ) if self._may_be_parted(held) and self._is_list_of_several(op.source, held):
                kept = frozenset(place for place in held.places if place[:1] not in (first, rest))
                return [replace(held, places=kept | {place}) for place in (first, (*rest, ANY_ITEM))]
        return []

    def _one_of(self, op: Unpack, held: Held) -> list[Held]:
        """`first, second = acquire_two()`, `acquire(2)`: one of the leases gets one of the names."""
        element = (*op.source, ANY_ITEM)
        if not self._is_a_list(op.source):
            return []
        plain = all(component != ANY_ITEM and len(target) == 1 for component, target in op.targets)
        inside = not held.places.isdisjoint({element, (*op.source, TO_COME)}) or self._dealt_out(op, held)
        if not plain or not inside or not self._may_be_parted(held):
            return []
        targets = {target for _, target in op.targets}
        kept = frozenset(place for place in held.places if place[:1] not in targets)
        return [replace(held, places=kept | {target}) for target in sorted(targets)]

    def _dealt_out(self, op: Unpack, held: Held) -> bool:
        if op.source not in held.places or self.acquisition.value not in (Value.INDEX, Value.OBJECT):
            return False
        return self.site >= 0 and len(op.targets) > 1 and self._portions.how_many() == len(op.targets)

    def _copies_into_another(self, op: Store, held: Held) -> bool:
        """`bigger[:used] = block[:used]`, both of this pool: what is written in it, not the block."""
        whole = op.source[:-1] if op.source[-1] == "[:]" else op.source
        return whole in held.places and op.target[:1] in self._of_the_same_pool

    @cached_property
    def _of_the_same_pool(self) -> frozenset[Path]:
        """What this function's acquires from it are called."""
        protocol = self.acquisition.protocol
        calls = [op for op in self.graph.ops if isinstance(op, Call)]
        asked = {op.target: self.effects.acquisition(op) for op in calls}
        names = {target for target, found in asked.items() if found and found.protocol == protocol}
        for op in self.graph.ops:
            if isinstance(op, Move | Await) and op.source in names:
                names.add(op.target)
        return frozenset(names)

    def _is_a_list(self, path: Path) -> bool:
        """Made here, or by the acquire: of `key, lease = table.popitem()` one is no lease."""
        seen, pending = {path}, [path]
        while pending:
            made = pending.pop()
            for node, op in enumerate(self.graph.ops):
                if (
                    getattr(op, "target", None) != made
                    or isinstance(op, Make | Constant)
                    or node == self.site
                ):
                    continue
                if not isinstance(op, Move | Await):
                    return False
                if op.source not in seen:
                    seen.add(op.source)
                    pending.append(op.source)
        return True

    def _may_be_parted(self, held: Held) -> bool:
        return self.site >= 0 and not any(map(self._outlives, held.places))


def _at_an_end(call: Call) -> bool:
    """`pop()`, `pop(0)`: of a list, not of what lies under a key."""
    return not call.kwargs and all(
        isinstance(given, ast.Constant) and given.value == 0 for given in call.at.args
    )


def _ends_or_moves(treatment: Treatment | None) -> bool:
    if treatment is None:
        return False
    return treatment.fate is not Fate.BORROW or treatment.moved_to is not None or treatment.leaves


def _list_in(source: Path) -> Path:
    return source[:-1] if source[-1] == "[:]" else source


def _as_written(call: ast.Call, position: Position) -> ast.expr | None:
    if position == -1:
        return call.func.value if isinstance(call.func, ast.Attribute) else None
    if isinstance(position, str):
        return next((each.value for each in call.keywords if each.arg == position), None)
    given = call.args[position] if position < len(call.args) else None
    return given.value if isinstance(given, ast.Starred) else given
