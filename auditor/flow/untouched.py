"""One object that was taken out of its place, for as long as nothing is done with it but to ask about it.

Whatever else happens to it (it is given away, returned, written to a field) ends the way: somebody may have
it then. What is left at a way out was dropped. It may lie in a list of the function's own meanwhile."""

import ast
from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import Protocol

from auditor.flow.lease import Loss
from auditor.ir.graph import Graph
from auditor.ir.ops import (
    RAISING,
    RESULT,
    Assume,
    Await,
    Call,
    Capture,
    Constant,
    Define,
    Delete,
    Edge,
    EndStatement,
    Enter,
    Exit,
    Fresh,
    InPlace,
    Leave,
    Lookup,
    Make,
    Move,
    Next,
    Op,
    Path,
    Store,
    Unpack,
    Way,
    Yield,
    is_temporary,
)
from auditor.source.nodes import walk

LOSSES = {Way.RETURN: Loss.RETURN, Way.FALL_THROUGH: Loss.FALL_THROUGH, Way.RAISE: Loss.RAISE}
SIMPLE = (ast.expr, ast.Return, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr)
HIDDEN = "~"  # in the names of lists that comprehensions fill


@dataclass(frozen=True, slots=True)
class Untouched:
    """`places` are names of it, and of what was read off it; `boxed` once it lies in a list of the function's
    own, which `places` name then, until the list is gone over for the last time, at `turn`. `asked` is the
    node of the last condition on it (boxed: of any), or of the call that failed since, `doubted` whether
    another condition on the object's own fields came after that."""

    places: frozenset[Path]
    boxed: bool = False
    turn: int = -1
    asked: int = -1
    doubted: bool = False

    @property
    def roots(self) -> frozenset[str]:
        """The names as the text has them, those within comprehensions included."""
        return frozenset(place[0].partition(HIDDEN)[0] for place in self.places if len(place) == 1)

    def names(self, path: Path) -> bool:
        """Whether the path is it, part of it, or what the object keeps under its number."""
        return (path[0],) in self.places or path in self.places

    def is_spelled_in(self, at: ast.AST) -> bool:
        """Whether a simple statement or an expression mentions it: `self.storage[page : page + 1]`. With
        `return page if fits else None` each way tells."""
        simple = isinstance(at, SIMPLE) and not isinstance(getattr(at, "value", at), ast.IfExp)
        names = (node for node in walk(at) if isinstance(node, ast.Name)) if simple else ()
        return any((each.id,) in self.places and isinstance(each.ctx, ast.Load) for each in names)


class Setting(Protocol):
    """What the domain has to know of the function around it; `own` is `self`."""

    @property
    def own(self) -> str: ...

    def asks_books(self, op: Assume) -> bool:
        """Whether a condition on the object's fields may be about the one that was taken."""

    def takes(self, call: Call) -> bool:
        """Whether the call takes another one out of the same store."""

    def may_fail(self, call: Call) -> bool:
        """Whether a handler of this function is for its failure, after which the object is as before."""

    def says_nothing(self, op: InPlace | Store) -> bool:
        """Whether it counts something new, or takes a mark off what has come back."""

    def renews_store(self, op: Store) -> bool:
        """Whether it puts another list in the place of a store."""

    def leaves_it(self, op: Call | Store, places: Set[Path]) -> bool:
        """Whether it works on the object, and gives nobody else hold of it."""

    def only_asks(self, call: Call, given: bool) -> bool:
        """Whether the call changes nothing; `given` tells that it was given the object."""

    def is_an_answer(self, at: ast.AST) -> bool:
        """Whether it is what the object answers, and no part of it."""

    def ends_it(self, call: Call) -> bool:
        """Whether the call gets rid of what it is given: nobody has it afterwards."""

    def branches_at(self, op: Assume) -> bool:
        """Whether this is the condition of an `if`."""

    def is_asked(self, at: ast.AST) -> bool:
        """Whether it is part of a condition."""

    def is_box(self, name: str) -> bool:
        """Whether this name is an empty list at first, and nothing but a list of what is taken."""

    def is_read_once_after(self, name: str, at: ast.AST) -> bool:
        """Whether this is the last that anything asks for the name."""

    def names_next(self, op: Next) -> bool:
        """Whether the loop goes on with another one under its name."""

    def stays_near(self, name: str) -> bool:
        """Whether nothing asks for this name outside the loop in which the object was taken."""


@dataclass(slots=True)
class Ends:
    """`lost` with the state before, and what else became of it."""

    lost: list[tuple[Loss, int, Untouched]] = field(default_factory=list)
    handed_out: bool = False
    passed_on: bool = False


class Forgetting:
    """The step function of one object, taken at `site`."""

    def __init__(self, graph: Graph, site: int, setting: Setting) -> None:
        self.graph = graph
        self.site = site
        self.setting = setting
        self.ends = Ends()

    def step(self, node: int, held: Untouched, edge: Edge) -> tuple[Untouched, ...]:
        """The state after `node`; none where somebody may have it, or where it was lost."""
        op = self.graph.ops[node]
        if edge in RAISING and not self._may_raise(op, held, edge):
            return ()
        if node == self.site or (isinstance(op, Call) and self.setting.takes(op)):
            return self._taken_again(node, replace(held, asked=node) if edge in RAISING else held)
        if edge in RAISING and isinstance(op, Call):
            return (replace(held, asked=node),)
        if isinstance(op, Leave):
            self.ends.lost.append((LOSSES[op.way], node, held))
            return ()
        if isinstance(op, Next) and not held.boxed and self.setting.names_next(op):
            return self._turned(node, op, held, edge) if edge is Edge.BODY else (held,)
        if isinstance(op, Next) and (self._is_gone_over(op, held) or held.turn == node):
            return self._turned(node, op, held, edge)
        if held.boxed and self._empties(op, held):
            self.ends.lost.append((Loss.REBOUND, node, held))
            return ()
        if not held.boxed and held.asked >= 0 and self._is_renamed(op, held):
            self.ends.lost.append((Loss.REBOUND, node, held))
            return ()
        after = self._after(node, op, held)
        return (after,) if after is not None and after.places else ()

    def _may_raise(self, op: Op, held: Untouched, edge: Edge) -> bool:
        """A `raise` in so many words; a store that is empty when more is asked of it; work that may fail."""
        if edge is Edge.RAISE:
            return not isinstance(op.at, ast.Assert)
        if edge is not Edge.CALL_RAISES or not isinstance(op, Call):
            return False
        failed = held.asked >= 0 and isinstance(self.graph.ops[held.asked], Call)
        return self.setting.takes(op) if held.boxed else not failed and self.setting.may_fail(op)

    def _taken_again(self, node: int, held: Untouched) -> tuple[Untouched, ...]:
        if node == self.site and not held.boxed:
            self.ends.lost.append((Loss.NEXT_TURN, node, held))
            return ()
        return (held,)

    def _empties(self, op: Op, held: Untouched) -> bool:
        """`run = []`, `run.clear()`: what was in it is nowhere."""
        match op:
            case Call(receiver=(name,), method="clear"):
                return (name,) in held.places
            case Move(target=(name,), source=source) if not (is_temporary((name,)) or held.names(source)):
                return (name,) in held.places and self.setting.is_box(name)
        return False

    def _is_renamed(self, op: Op, held: Untouched) -> bool:
        """`env = self._start()`: the one name that it had is another's."""
        match op:
            case Move(target=(name,), source=source) if not is_temporary((name,)) and not held.names(source):
                named = {place for place in held.places if not is_temporary(place)}
                return named == {(name,)} and HIDDEN not in name and not held.is_spelled_in(op.at)
        return False

    def _is_gone_over(self, op: Next, held: Untouched) -> bool:
        alone = held.boxed and held.names(op.source) and len(op.source) == 1
        return alone and self.setting.is_read_once_after(op.source[0], op.at)

    def _turned(self, node: int, op: Next, held: Untouched, edge: Edge) -> tuple[Untouched, ...]:
        """`for page in pages:` of what was collected: each is on its own from here."""
        if edge is Edge.BODY and held.boxed:
            return (Untouched(frozenset({op.target}), turn=node),)
        if edge is Edge.BODY:
            self.ends.lost.append((Loss.NEXT_TURN, node, held))
        return ()

    def _after(self, node: int, op: Op, held: Untouched) -> Untouched | None:
        if isinstance(op, Call | Await | Move | Fresh) and self.setting.is_an_answer(op.at):
            return held
        match op:
            case Assume():
                return self._assume(node, op, held)
            case Call():
                return self._call(op, held)
            case Move(target=target, source=source) | Await(target=target, source=source):
                return self._named(held, target, held.names(source) or held.is_spelled_in(op.at))
            case Fresh(target=target, uses=uses):
                return self._named(held, target, any(map(held.names, uses)) or held.is_spelled_in(op.at))
            case Make(target=target, items=items):
                return self._named(held, target, any(held.names(path) for _, path in items))
            case Lookup(target=target, index=index):
                if held.names(index) and target[0] == self.setting.own:
                    return replace(held, places=held.places | {target})
                return self._named(held, target, held.names(index) or held.names(target))
            case Constant(target=target):
                return self._named(held, target, False)
            case Define(name=name, names=names):
                is_it = not held.boxed and any((each,) in held.places for each in names)
                return self._named(held, (name,), True) if is_it else held
            case Unpack():
                return self._unpacked(op, held)
            case EndStatement():
                passing = {p for p in held.places if is_temporary(p) or p[0] == self.setting.own}
                return replace(held, places=held.places - passing)
            case Store():
                return held if self.setting.says_nothing(op) else self._stored(op, held)
        return None if self._touches(op, held) else held

    def _assume(self, node: int, op: Assume, held: Untouched) -> Untouched:
        if op.kind == "none" and not op.says_absent and op.subject in held.places:
            return held  # `if slot is None: return None`: there is one
        if isinstance(op.at, ast.BoolOp) and not held.boxed:
            return held  # its parts have been asked: `if first is None or second is None:`
        if held.boxed or op.names & held.roots or (op.subject or ("",))[0] in held.roots:
            return replace(held, asked=node)
        if held.asked >= 0:
            return replace(held, doubted=held.doubted or self.setting.asks_books(op))
        return replace(held, asked=node) if self.setting.branches_at(op) else held

    def _call(self, op: Call, held: Untouched) -> Untouched | None:
        receiver = [op.receiver] if op.receiver is not None else []
        operands = [path for path, _ in op.args] + [path for _, path in op.kwargs] + receiver
        given = any(map(held.names, operands)) or held.is_spelled_in(op.at)
        if not given:
            elsewhere = all(path[0] != self.setting.own for path in operands)
            return held if elsewhere or self.setting.only_asks(op, False) else None
        box = op.receiver if op.method in ("append", "add") else None
        if box is not None and len(box) == 1 and len(operands) == 2 and self.setting.is_box(box[0]):
            return held if held.boxed else replace(held, places=frozenset({box}), boxed=True)
        if self.setting.leaves_it(op, held.places):
            return held
        if self.setting.only_asks(op, True):
            return replace(held, places=held.places | {op.target})
        itself = any(path[0] != self.setting.own and held.names(path) for path in receiver)
        self.ends.passed_on |= not itself and not self.setting.ends_it(op)
        return None

    def _named(self, held: Untouched, target: Path, is_it: bool) -> Untouched | None:
        """`target` names it from here on, or something else."""
        if not is_it and target not in held.places:
            return held
        temporary = is_temporary(target) or HIDDEN in target[0]
        if not is_it:  # something else is in its place now
            return replace(held, places=held.places - {target}) if temporary else None
        if target == RESULT:
            self.ends.handed_out = True
            return None
        if temporary:
            return replace(held, places=held.places | {target})
        first = held.boxed and all(is_temporary(p) or HIDDEN in p[0] for p in held.places)
        near = not held.boxed and self.setting.stays_near(target[0])
        if len(target) == 1 and (first or near):
            return replace(held, places=held.places | {target})
        self.ends.passed_on = True
        return None

    def _unpacked(self, op: Unpack, held: Untouched) -> Untouched | None:
        after: Untouched | None = held
        for _, target in op.targets:
            after = after and self._named(after, target, held.names(op.source))
        return after

    def _stored(self, op: Store, held: Untouched) -> Untouched | None:
        """Into a list or table of the function's own; anywhere else it has been handed over, or worked on."""
        own = len(op.target) > 1 and self.setting.is_box(op.target[0])
        if held.names(op.source) and (own or HIDDEN in op.target[0]):
            return replace(held, places=frozenset({op.target[:1]}), boxed=True)
        if own and held.names(op.target):
            return held
        if HIDDEN in op.target[0] and held.boxed and self.setting.is_asked(op.at):
            return held  # what each is asked: `any(isnan(self.rows[page]).any() for page in pages)`
        if self.setting.leaves_it(op, held.places):
            return held
        if held.names(op.source) or held.names(op.target) or held.is_spelled_in(op.at):
            self.ends.passed_on = True
            return None
        return None if op.target[0] == self.setting.own and not self.setting.renews_store(op) else held

    def _touches(self, op: Op, held: Untouched) -> bool:
        """Whether any other operation has to do with it, or sets the object's fields."""
        match op:
            case InPlace(target=target, operand=operand) if not self.setting.says_nothing(op):
                paths = [target, operand]
            case Delete(target=target):
                paths = [target]
            case Next(target=target, source=source):
                if held.boxed and self.setting.is_asked(op.at):
                    return False  # `if any(page > bound for page in pages):`
                paths = [target, source]
            case Enter(target=target, context=context):
                return held.names(target) or held.names(context)
            case Exit(context=context):
                return held.names(context)
            case Yield(source=source):
                paths = [source] if source is not None else []
                self.ends.handed_out |= any(map(held.names, paths))
            case Capture(names=names):
                return any((name,) in held.places for name in names)
            case _:
                return False
        touched = any(map(held.names, paths))
        self.ends.passed_on |= touched and not isinstance(op, Yield)
        return touched or (isinstance(op, (InPlace, Delete)) and paths[0][0] == self.setting.own)
