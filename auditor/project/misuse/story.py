"""How a misuse is told: the steps from the acquire over the release to the place where it goes wrong."""

from dataclasses import dataclass

from auditor.flow.decisive import decisive
from auditor.flow.solve import Solution
from auditor.flow.trace import Placed, State, Station, shortest_path, span_of, tell
from auditor.ir.ops import Leave, Path, Store, is_temporary
from auditor.model import Span, Step
from auditor.project.code.modules import Function


@dataclass(frozen=True, slots=True)
class Story:
    """`steps` end at `span`."""

    span: Span
    steps: tuple[Step, ...]


def place_of(function: Function, node: int) -> Span:
    """The syntax of a node, a release by the end of a `with` being its context expression."""
    return span_of(function.module.path, function.graph.ops[node].at, function.module.lines)


def story(
    function: Function,
    solution: Solution[State],
    node: int,
    state: State,
    first: Step | None,
    milestones: dict[int, str],
    last_words: str,
) -> Story:
    """The path to `node`; `milestones` are nodes on it that have something to say."""
    stations = shortest_path(function.graph, solution, node, state)
    span = _span(function, node, state, stations)
    steps = [first] if first is not None else []
    branches = decisive(function.graph, solution, stations, [(node, state)])
    for step in tell(function.graph, function.module.path, branches, function.module.lines, milestones):
        if not steps or step != steps[-1]:
            steps.append(step)
    steps.append(Step(span.path, span.line, span.column, last_words))
    return Story(span, tuple(steps))


def _span(function: Function, node: int, state: Placed, stations: list[Station]) -> Span:
    """A view that is still stored when the function is left is told where it was stored."""
    op = function.graph.ops[node]
    if isinstance(op, Leave) and ("%return",) not in {place[:1] for place in state.places}:
        for station in reversed(stations):
            stored = function.graph.ops[station.node]
            target = stored.target if isinstance(stored, Store) else getattr(stored, "receiver", None)
            if target and any(_kept_at(place, target) for place in state.places):
                return place_of(function, station.node)
    return place_of(function, node)


def _kept_at(place: Path, target: Path) -> bool:
    """Stored at the target itself, or put into the container that it is."""
    return len(place) > 1 and place[: len(target)] == target


def name_of(places: frozenset[Path]) -> str:
    """The lease as a message calls it."""
    names = sorted(
        ("".join(place).lstrip("@") for place in places if not is_temporary(place) and "~" not in place[0]),
        key=lambda name: (len(name), name),
    )
    named = [name for name in names if name != "%return"]
    return f"`{named[0]}`" if named else "the lease"
