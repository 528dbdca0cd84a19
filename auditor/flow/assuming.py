"""What conditions say about one lease: branches that are not taken while it is held, or that end it."""

import ast
from dataclasses import replace
from functools import cached_property

from auditor.flow.asked_twice import asked_just_before
from auditor.flow.effects import Handle, Value
from auditor.flow.fewer import Fewer
from auditor.flow.held import Held
from auditor.flow.indirect import lies_within
from auditor.flow.lists import Lists
from auditor.flow.passing import Passing
from auditor.flow.places import begins_with
from auditor.ir.calls import PUTTING
from auditor.ir.conditions import asks_length, path_tested
from auditor.ir.ops import ANY_ITEM, Assume, Await, Call, Move, Next, Path, Unpack
from auditor.ir.standing import asks_itself


class Assuming(Passing):
    """The lease as the subject of tests."""

    def _assume(self, node: int, op: Assume, held: Held) -> Held | None:
        """A held lease is neither None nor false, and a container of it is not empty; it is itself and
        nothing else."""
        if op.says_over and self._is_over(op, held):
            return None
        if self._has_ended(op, held):
            self.endings.released.setdefault(node, held)
            return None
        if op.kind in ("zero", "some"):
            number = self.acquisition.value is Value.AMOUNT or self.acquisition.zero_is_none
            granted = number and op.subject in held.places
            return (
                None if granted and op.value == (op.kind == "zero") else held
            )  # what is owed is more than 0
        if op.kind == "same":
            return held if self._identical(op, held) in (op.value, None) else None
        if op.kind == "standard":
            if op.value and op.subject in held.places and self._is_put_there_otherwise(op):
                return None
            return held if self._among(op, held) in (op.value, None) else None
        if op.subject is None or not op.says_absent:
            return held
        if op.subject in self._asked_just_before:
            return None
        if self._asks_what_is_there(op):
            return held
        if self.acquisition.keyed:
            zero = self.acquisition.from_zero and op.kind == "truth"
            told = not held.stale and not zero and op.subject in self.answers
            told |= op.kind == "none" and op.subject in held.places  # no key is None
            return None if told else held
        if op.asks_the_sort and op.subject not in held.places:
            return held
        if op.kind in ("granted", "refused") and self._outlives((*op.subject, ".outcome")):
            return held  # `self.ok()` does not speak of what lies in its fields
        if self.acquisition.from_zero and op.kind == "truth" and op.subject in held.places:
            return held  # it is 0
        if op.subject in self._beside_it and op.subject in held.places:
            return replace(held, places=held.places - {op.subject})
        if any(begins_with(place, op.subject) for place in held.places):
            return self._another_element(op, held)
        reaching = (place for place in held.maybe if not lies_within(place))
        if any(begins_with(place, op.subject) and len(place) > len(op.subject) for place in reaching):
            self.endings.unknown.add(node)
            return None
        return held

    def _asks_what_is_there(self, op: Assume) -> bool:
        """`if not os.path.exists(path)` of a path that a pool of the tree lends, whatever lies there; or `if
        len(shard) == 0` of what came with the key by which it is owed."""
        if self.acquisition.declared or not isinstance(op.at, ast.expr):
            return False
        if isinstance(op.at, ast.Call) and path_tested(op.at) is not None:
            return True
        return self.acquisition.keyed and asks_length(op.at)

    @cached_property
    def answers(self) -> frozenset[Path]:
        """`slot` of `slot = pool.assign(request)`, which is owed under the request: where it is below 0,
        nothing was taken. A name that is given something else as well says nothing."""
        site = self.graph.ops[self.site] if self.site >= 0 else None
        if not isinstance(site, Call):
            return frozenset()
        found = {site.target}
        for op in self.graph.ops:
            if isinstance(op, Move | Await) and op.source in found and len(op.target) == 1:
                found.add(op.target)
        return frozenset(path for path in found if path == site.target or self._written(path) == 1)

    @cached_property
    def _asked_just_before(self) -> frozenset[Path]:
        """`first` of `first = pool.take()` right before `second = pool.take()`: a pool that had none for the
        first has none for the second."""
        if self.acquisition.handle is not Handle.RESULT:
            return frozenset()
        names = asked_just_before(self.graph, self.site)
        return frozenset(name for name in names if self._written(name) == 1)

    def _written(self, name: Path) -> int:
        return sum(getattr(op, "target", None) == name for op in self.graph.ops)

    @cached_property
    def _beside_it(self) -> frozenset[Path]:
        """`request` of `for request, slot in self.batch:`, where it is not known which part of the entry the
        lease is, but `slot` is given back."""
        ends = [
            {path for path, _ in op.args} | ({op.receiver} if op.receiver is not None else set())
            for op in self.graph.ops
            if isinstance(op, Call) and self.effects.is_own_end(op.method, self.acquisition.protocol)
        ]
        ended = frozenset[Path]().union(*ends)
        turns = {op.target for op in self.graph.ops if isinstance(op, Next)}
        entries = [
            {target for _, target in op.targets}
            for op in self.graph.ops
            if isinstance(op, Unpack) and op.source in turns
        ]
        return frozenset[Path]().union(*(parts - ended for parts in entries if parts & ended))

    def _another_element(self, op: Assume, held: Held) -> Held | None:
        """`for buffer in buffers: if buffer is None: return`: that is not the one that was acquired, which is
        still in the list then."""
        if op.subject is None or any(ANY_ITEM in place for place in self.acquisition.places):
            return None
        for head in held.seen:
            loop = self.graph.ops[head]
            if isinstance(loop, Next) and op.subject in self._elements(loop):
                roots = {loop.target[0], op.subject[0]}
                places = frozenset(place for place in held.places if place[0] not in roots)
                maybe = frozenset(place for place in held.maybe if place[0] not in roots)
                another = replace(held, places=places, maybe=maybe, seen=held.seen - {head})
                return another if self._listed(another) else None
        return None

    def _elements(self, loop: Next) -> set[Path]:
        """What the loop calls an element, or a part of it."""
        apart = [op for op in self.graph.ops if isinstance(op, Unpack) and op.source == loop.target]
        return {loop.target, *(target for op in apart for _, target in op.targets)}

    def _is_over(self, op: Assume, held: Held) -> bool:
        """The lease itself is asked; of a number, whether it is a descriptor that must stay open."""
        number = self.acquisition.value is Value.INDEX
        fitting = {"standard": number, "above": number, "plain": not number, "file": not number}
        asked = fitting.get(op.kind, True) and (self.acquisition.declared or op.kind not in fitting)
        return asked and op.subject in held.places and not self._asks_another(op)

    def _asks_another(self, op: Assume) -> bool:
        """`self.gates[slow].locked()` says nothing of `self.gates[fast]`."""
        listed = op.subject is not None and op.subject[-1] == ANY_ITEM
        asked = asks_itself(op.at) if listed and isinstance(op.at, ast.expr) else None
        acquired = self.acquisition.text.rpartition(".")[0]
        return asked is not None and ast.unparse(asked[0]) != acquired and acquired.endswith("]")

    def _has_ended(self, op: Assume, held: Held) -> bool:
        """`while code is None: code = process.poll()`: past the loop the process has ended; so it has where
        its `returncode` is not None. Of what a pool of the tree lends, an answer is no end."""
        if not self.acquisition.declared or op.kind != "none" or op.value or op.subject is None:
            return False
        if op.subject[-1] == ".returncode" and op.subject[:-1] in held.places:
            return True
        return self.graph.polled().get(op.subject) in held.places

    def _identical(self, op: Assume, held: Held) -> bool | None:
        """Whether `subject is other`, as far as one of them is the lease."""
        if op.subject is None or op.other is None or self.acquisition.keyed or self.acquisition.shared:
            return None
        paths = (op.subject, op.other)  # of the lease, or of the object that it lies in
        holding = [any(place[: len(path)] == path for place in held.places) for path in paths]
        if not any(holding) or {op.subject, op.other} & held.maybe:
            return None
        return all(holding)

    def _among(self, op: Assume, held: Held) -> bool | None:
        """Whether the lease is in the list, as far as only such leases get into that."""
        if op.other is None or op.subject not in held.places or self._outlives((*op.other, ANY_ITEM)):
            return None
        if not self._lists.filled_here(op.other):
            return None
        perhaps = any(begins_with(place, op.other) for place in held.maybe)
        return None if perhaps or held.parted else (*op.other, ANY_ITEM) in held.places

    def _is_put_there_otherwise(self, op: Assume) -> bool:
        """`if number not in link.numbers: link.numbers.append(number)`: it lies there on both ways."""
        return any(
            isinstance(each, Call)
            and each.method in PUTTING
            and each.receiver == op.other
            and (op.subject, False) in each.args
            for each in self.graph.ops
        )

    @cached_property
    def _lists(self) -> Lists:
        return Lists(self.graph, self.site)

    @cached_property
    def _fewer(self) -> Fewer:
        site = self.graph.ops[self.site]
        assert isinstance(site, Call)
        return Fewer(self.graph, site.at)
