"""Counts told by their shape: `begin_request` raises a number that `end_request` lowers."""

import ast
from collections.abc import Iterator

from auditor.project.bindings import own_attribute, own_name
from auditor.project.modules import Function
from auditor.project.pool_state import own_parameters
from auditor.protocols.vocabulary import Name, split, take_apart

OPPOSITES = (
    (frozenset({"begin", "start", "enter"}), frozenset({"end", "finish", "stop", "leave", "exit", "done"})),
    (frozenset({"hold", "use", "occupy"}), frozenset({"release", "unhold", "unuse", "vacate", "drop"})),
    (frozenset({"attach", "join"}), frozenset({"detach", "leave", "unjoin"})),
    (
        frozenset({"suspend", "pause", "block", "disable"}),
        frozenset({"resume", "unpause", "unblock", "enable"}),
    ),
)
"""What begins and what ends, where both work on one number. What was added to something may stay there."""

REFERENCES = frozenset({"ref", "refs", "refcount", "refcnt", "references", "pins"})
"""Words in the names of counts of those who need an object."""

BEGINNINGS = frozenset().union(*(begins for begins, _ in OPPOSITES))
ENDINGS = frozenset().union(*(ends for _, ends in OPPOSITES))


def use_counts(methods: list[Function]) -> Iterator[tuple[Function, Function]]:
    """Methods of one class, the one counting up what the other counts down."""
    up = [(method, name, _counted(method, ast.Add)) for method, name in _named(methods, BEGINNINGS)]
    down = [(method, name, _counted(method, ast.Sub)) for method, name in _named(methods, ENDINGS)]
    for begins, its, raised in up:
        for ends, other, lowered in down:
            if raised & lowered and _opposite(its, other):
                yield begins, ends


def reference_counts(methods: list[Function]) -> Iterator[tuple[Function, Function]]:
    """`retain(page)` raises the `page.refs` that `drop(page)` lowers: the count is the object's own."""
    raised = {id(method): _counted_of_told(method, ast.Add) for method in methods}
    lowered = {id(method): _counted_of_told(method, ast.Sub) for method in methods}
    for begins in methods:
        for ends in methods:
            both = raised[id(begins)] & lowered[id(ends)]
            if both and not (raised[id(ends)] or lowered[id(begins)]):
                yield begins, ends


def _counted_of_told(method: Function, way: type[ast.operator]) -> set[str]:
    """Numbers of references, by their names, of the first thing that it is told."""
    told = own_parameters(method)[:1]
    return {
        node.target.attr
        for node in ast.walk(method.node)
        if isinstance(node, ast.AugAssign)
        and isinstance(node.op, way)
        and isinstance(node.target, ast.Attribute)
        and isinstance(node.target.value, ast.Name)
        and node.target.value.id in told
        and not REFERENCES.isdisjoint(split(node.target.attr))
    }


def _named(methods: list[Function], verbs: frozenset[str]) -> Iterator[tuple[Function, Name]]:
    for method in methods:
        name = take_apart(method.name, verbs)
        if name is not None and not method.name.startswith("__"):
            yield method, name


def _counted(method: Function, way: type[ast.operator]) -> set[str]:
    """Fields of its own object, or what they hold under a key, that it changes one way only."""
    own = own_name(method)
    changed: dict[str, set[type[ast.operator]]] = {}
    for node in ast.walk(method.node):
        if isinstance(node, ast.AugAssign) and own is not None:
            target = node.target.value if isinstance(node.target, ast.Subscript) else node.target
            attribute = own_attribute(target, own)
            if attribute is not None:
                changed.setdefault(attribute, set()).add(type(node.op))
    return {attribute for attribute, ways in changed.items() if ways == {way}}


def _opposite(begins: Name, ends: Name) -> bool:
    alike = not begins.affix or not ends.affix or bool(begins.affix & ends.affix)
    return alike and any(begins.verb in some and ends.verb in others for some, others in OPPOSITES)
