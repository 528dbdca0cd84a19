"""What is known of a lease behind its function: where it lies, who gets it, what the result says of it."""

from collections.abc import Iterable

from auditor.flow.follow import Followed
from auditor.flow.held import Endings
from auditor.flow.knowledge import NOTHING, Knowledge
from auditor.ir.ops import Call
from auditor.project.code.bindings import given_to
from auditor.project.leases.beginnings import (
    always_in_a_table,
    flags_beside,
    missing,
    of_parameters,
    of_receiver,
    reads_field,
)
from auditor.project.leases.following import Following
from auditor.project.leases.held_over import held_over
from auditor.project.meaning.own_pools import is_memory_of_a_pool
from auditor.project.meaning.telling import said_by
from auditor.project.outcome import Outcome


class Afterwards(Following):
    """Notes it in the outcome."""

    def _tell(
        self, outcome: Outcome, node: int, op: Call, followed: Followed, *, shown: bool, left: bool
    ) -> None:
        """Where it is afterwards. `shown`: to whoever gets the result; `left`: as it is for the callers."""
        endings, acquisition = followed.endings, outcome.acquisition
        known = self.known[node] | acquisition.given
        outcome.unless = missing(self.function, op.at, known)
        outcome.asked = of_parameters(self.graph.parameters, known)
        outcome.under = self._own(known)
        if endings.returned and shown and not self._shown(endings):
            outcome.flags = flags_beside(self.graph, followed)
            outcome.own = self._own(known | of_receiver(op, acquisition))
            outcome.returned = sorted(set(endings.returned.values()))[0]
            outcome.returned_at = frozenset(endings.returned)
            outcome.asked |= self._asked_at(endings.returned)
            outcome.returned_too = frozenset(endings.returned_too)
            outcome.recorded = always_in_a_table(endings, self.function.owner)
        if not is_memory_of_a_pool(op.at, self.function, self.effects.recogniser.pools):
            outcome.stored = sorted(endings.left_in.items())
        there = [(at, held) for at in endings.stored for held in followed.solution.states.get(at, ())]
        outcome.says = said_by(self.graph, followed.solution, there)
        if acquisition.keyed and left:
            outcome.own = self._own(known | of_receiver(op, acquisition))
            outcome.held_over, outcome.says = held_over(self.function, node, acquisition, followed, known)
        outcome.beside = frozenset(path for _, path in endings.beside)
        outcome.together = frozenset(endings.together)
        outcome.noted = frozenset(endings.noted)
        outcome.unknown = bool(endings.unknown)

    def _shown(self, endings: Endings) -> bool:
        """`return self.handles[-1]` of a list that the object keeps: its callers look at what is there."""
        own = self.function.owner
        values = [getattr(self.graph.ops[node].at, "value", None) for node in endings.returned]
        return all(own and reads_field(value, own) for value in values)

    def _asked_at(self, returning: Iterable[int]) -> Knowledge:
        """`if keep: return slot`: who does not ask for it gets none. What a parameter was before `into =
        pool.fetch()`, nothing says behind that."""
        parameters = tuple(each for each in self.graph.parameters if not any(given_to(self.function, each)))
        asked = [of_parameters(parameters, self.known.get(node, NOTHING)) for node in returning]
        return frozenset.intersection(*asked)

    def _own(self, known: Knowledge) -> frozenset[tuple[str, bool]]:
        """What is known of the fields of the method's own object, without its name."""
        own = self.function.owner
        return frozenset(
            (key[len(own) :], truth) for key, truth in known if own and key.startswith(f"{own}.")
        )
