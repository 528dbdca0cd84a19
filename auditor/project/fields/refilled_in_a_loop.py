"""A loop that calls a method which puts a lease into a field, and comes to the call again while what it put
there before is still there: `for each in adapters: self._begin(each)`, `if not ok: continue`, and only
behind that `self._commit(each)`; or a place in a table, where each turn tells the same key: `for name in
names: self.fence("h2d")`."""

import ast
from collections.abc import Iterable, Mapping, Sequence

from auditor.flow.effects import Acquisition, Handle, Position
from auditor.flow.follow import EDGES, follow_from, known_at_nodes
from auditor.flow.held import Held
from auditor.flow.knowledge import Knowledge
from auditor.flow.limits import TooManyStates
from auditor.ir.graph import Graph, TooLarge
from auditor.ir.ops import ANY_ITEM, Edge, Path
from auditor.project.code.bindings import own_attribute
from auditor.project.code.calls import parameter_for
from auditor.project.code.modules import Function
from auditor.project.fields.filling_again import Filling, fillings, looks_first
from auditor.project.meaning.sites import site_nodes
from auditor.project.meaning.summaries import EffectsOf
from auditor.project.outcome import Outcome


def refilled_in_a_loop(
    outcome: Outcome, path: Path, family: Sequence[Function], effects_of: EffectsOf
) -> Filling | None:
    """The store, where a method of the class calls its own in such a loop, and no exception leads on."""
    filler, field = outcome.function, path[1][1:]
    stores = fillings(filler, path[0], field)
    if path[2:] not in ((), (ANY_ITEM,)) or len(stores) != 1 or looks_first(stores[0], family):
        return None
    for caller in family:
        for call in caller.calls if caller is not filler and caller.owner is not None else ():
            asked = own_attribute(call.func, caller.owner or "") == filler.name
            if not asked or (path[2:] and not _tells_one_key(stores[0], call)):
                continue
            if _comes_again(caller, call, outcome.acquisition, path, effects_of):
                return stores[0]
    return None


def _tells_one_key(filling: Filling, call: ast.Call) -> bool:
    """`self.fence("h2d")`, which `self.fences[name]` is set under."""
    key = filling.key.id if isinstance(filling.key, ast.Name) else ""
    told: list[tuple[Position, ast.expr]] = list(enumerate(call.args))
    told += [(each.arg or "", each.value) for each in call.keywords]
    return any(
        isinstance(given, ast.Constant) and parameter_for(filling.method, position, True) == key
        for position, given in told
    )


def _comes_again(
    caller: Function, call: ast.Call, acquisition: Acquisition, path: Path, effects_of: EffectsOf
) -> bool:
    place = (caller.owner or "", *path[1:])
    given = Acquisition(acquisition.protocol, Handle.RESULT, acquisition.value, (place,), "")
    try:
        graph: Graph = caller.graph
        known = known_at_nodes(graph)
        return any(
            any(place in held.places for held in _coming_again(caller, node, given, known, effects_of))
            for node in site_nodes(caller, call)
            if node in known
        )
    except (TooLarge, TooManyStates, RecursionError):
        return False


def _coming_again(
    caller: Function, node: int, given: Acquisition, known: Mapping[int, Knowledge], effects_of: EffectsOf
) -> Iterable[Held]:
    graph: Graph = caller.graph
    begun = [target for target, edge in graph.successors[node] if edge is Edge.NORMAL]
    followed = follow_from(graph, effects_of(caller), given, node, known[node], begun, EDGES["none"])
    return followed.solution.states.get(node, ())
