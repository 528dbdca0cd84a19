"""Follow the acquires of one function, each alone, and tell one what the others have shown."""

from collections.abc import Iterator
from dataclasses import replace

from auditor.flow.effects import Acquisition, Handle
from auditor.flow.follow import UNSEEN, Followed, Shown, doubtful, follow_acquire, known_at_nodes
from auditor.flow.knowledge import NOTHING, Knowledge
from auditor.flow.operands import uses
from auditor.ir.graph import Graph
from auditor.ir.ops import Call, Edge, Path
from auditor.project.code.modules import Function
from auditor.project.leases.beginnings import asked, handed_out, of_receiver
from auditor.project.leases.borrowing import alike_beside, told_together
from auditor.project.leases.wound_back import wound_back_at
from auditor.project.meaning.borrowers import Asks, Called
from auditor.project.meaning.effects import FunctionEffects
from auditor.project.meaning.sites import loops_around
from auditor.project.meaning.source import Source

ARENA: Path = ("<arena>",)
"""Where a lease lies, besides, that ends with all the others."""


class Following:
    """What is known of the function's conditions is computed once, and so is the way of each lease."""

    def __init__(self, function: Function, effects: FunctionEffects, edges: frozenset[Edge]) -> None:
        self.function = function
        self.graph: Graph = function.graph
        self.effects = effects
        self.edges = edges
        self._asks = Asks(function, effects.recogniser.calls)
        self._known: dict[int, Knowledge] | None = None
        self._alone: dict[tuple[int, Handle, tuple[Path, ...], Knowledge], Followed] = {}

    @property
    def known(self) -> dict[int, Knowledge]:
        if self._known is None:
            self._known = known_at_nodes(self.graph)
        return self._known

    def is_placed(self, node: int, source: Source | None) -> bool:
        """Whether it can be told where the lease lies."""
        op = self.graph.ops[node]
        return isinstance(op, Call) and self.effects.acquisition(op, source) is not None

    def acquisition(self, node: int, source: Source | None) -> Acquisition:
        op = self.graph.ops[node]
        assert isinstance(op, Call)
        acquisition = self.effects.acquisition(op, source)
        assert acquisition is not None
        if acquisition.handle is not Handle.RESULT or acquisition.declared:
            return acquisition
        until = wound_back_at(self.function, self.effects.recogniser, op.at, acquisition.protocol)
        return (
            replace(acquisition, until=until, places=(*acquisition.places, ARENA)) if until else acquisition
        )

    def followed(self, node: int, source: Source | None) -> Followed:
        """`run(a, b)`, of which nothing is known, had borrowed b where it had borrowed a: that is given back
        further on. Raises `solve.TooManyStates`."""
        alone = self._followed_alone(node, source)
        if not alone.endings.unknown:
            return alone
        shown = self._shown_beside(node, source)
        found = self._follow(node, source, shown) if shown != UNSEEN else alone
        returned = self.acquisition(node, source).handle is Handle.RESULT
        while returned and (more := self._lent_elsewhere(found) - shown.lent):
            shown = Shown(shown.lent | more, shown.others | found.shown.others)
            found = self._follow(node, source, shown)
        return found

    def lent(self) -> Iterator[Called]:
        """Functions of whose effects nothing is known, and that turned out to have borrowed."""
        for (_, handle, *_), followed in self._alone.items():
            for node in followed.shown.lent if handle is Handle.RESULT else ():
                yield from self._asks.shown_by(node)

    def _lent_elsewhere(self, followed: Followed) -> frozenset[int]:
        """Calls of those that have only borrowed what another function gave them."""
        borrowers = self.effects.recogniser.borrowers
        unsure = doubtful(self.graph, followed.endings) if borrowers else ()
        return frozenset(node for node in unsure if self._asks.a_borrower(node, borrowers))

    def _shown_beside(self, node: int, source: Source | None) -> Shown:
        """By other leases of the same pool. Of a call without a result that is only believed of those that
        came together: `sequence.replace(old, new)` may keep one of two, and what `build(scratch, slot)`
        returns may hold one."""
        protocol = self.acquisition(node, source).protocol
        lent: set[int] = set()
        others: set[str] = set()
        sites = self._sites()
        for other, its in sites if len(sites) > 1 else ():
            if its.protocol == protocol:
                shown = self._followed_alone(other, its).shown
                together = other == node
                lent |= {call for call in shown.lent if together or self._answers(call)}
                lent |= alike_beside(self.graph, shown.lent)
                together = together or told_together(self.graph, shown.lent, node, other)
                others |= shown.others if together else set()
        return Shown(frozenset(lent), frozenset(others))

    def _answers(self, node: int) -> bool:
        """Whether what the call returns is used."""
        target = getattr(self.graph.ops[node], "target", None)
        return any(path == target for op in self.graph.ops for path in uses(op))

    def _sites(self) -> list[tuple[int, Source]]:
        """Of every lease of the function that a call returned."""
        found = []
        for node in self.known:
            op = self.graph.ops[node]
            source = self.effects.recogniser.source(self.function, op.at) if isinstance(op, Call) else None
            for each in (source, *source.also) if source is not None else ():
                if each.handle is Handle.RESULT and not each.lease:
                    found.append((node, each))
        return found

    def _followed_alone(self, node: int, source: Source | None) -> Followed:
        acquisition = self.acquisition(node, source)
        key = node, acquisition.handle, acquisition.places, acquisition.flags
        if key not in self._alone:
            self._alone[key] = self._follow(node, source)
        return self._alone[key]

    def _follow(self, node: int, source: Source | None, shown: Shown = UNSEEN) -> Followed:
        op = self.graph.ops[node]
        assert isinstance(op, Call)
        acquisition = self.acquisition(node, source)
        known = self.known.get(node, NOTHING)
        if acquisition.handle is Handle.RESULT:
            known = known | handed_out(self.graph, op, acquisition)
        elif not (acquisition.opened or acquisition.helped):
            known = (
                known | handed_out(self.graph, op, acquisition) | asked(op)
            )  # `if lock.acquire(blocking=False):`
        known = known | {(op.target[0] + item, truth) for item, truth in acquisition.flags}
        known = known | of_receiver(op, acquisition) | acquisition.given
        lends, loops = self.function.is_context_manager, loops_around(self.function, op.at)
        return follow_acquire(
            self.graph, self.effects, acquisition, node, known, self.edges, lends, loops, shown
        )
