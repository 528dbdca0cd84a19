"""Methods that implement an interface's halves: who has to provide `inc_lock_ref` and `dec_lock_ref` acquires
and gives back by them, whatever the bodies ask for in their turn."""

import ast
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace

from auditor.flow.effects import Handle
from auditor.project.code.class_model import ClassModel
from auditor.project.code.modules import Class, Function
from auditor.project.pools.bodies import returns_something
from auditor.project.pools.halves import Half, Pair
from auditor.project.shapes.pool_state import own_parameters


def with_implementations(model: ClassModel, pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs, those of interfaces with what implements both halves in classes below; not where the class
    has shown for itself what its method is."""
    sure = [pair for pair in pairs if not pair.proposed]
    known = {half.function for pair in sure for half in (*pair.acquires, *pair.releases)}
    return [_with_those_below(model, pair, known) if _is_promised(pair) else pair for pair in pairs]


def _is_promised(pair: Pair) -> bool:
    return pair.owner is not None and all(half.function.is_abstract for half in pair.acquires)


def _with_those_below(model: ClassModel, pair: Pair, known: Set[Function]) -> Pair:
    below = list(model.subclasses(pair.owner)) if pair.owner is not None else []
    acquires, releases = [], []
    for cls in below:
        ends = [half for half in _implemented(cls, pair.releases) if _does_something(half.function)]
        begins = [half for half in _implemented(cls, pair.acquires) if _hands_out(half)]
        if ends and begins and known.isdisjoint(half.function for half in begins):
            acquires += begins
            releases += ends
    return replace(pair, acquires=(*pair.acquires, *acquires), releases=(*pair.releases, *releases))


def _implemented(cls: Class, promised: Sequence[Half]) -> Iterator[Half]:
    """By the class's own methods that are told what the promise says."""
    for half in promised:
        method = cls.methods.get(half.function.name)
        if method is None or method.is_abstract or method.is_property or method.is_static:
            continue
        if half.handle is not Handle.ARGUMENT or _is_told(method, half):
            yield replace(half, function=method)


def _is_told(method: Function, half: Half) -> bool:
    """By place, whatever the parameter is called: `inc_lock_ref(node)`, and `inc_lock_ref(node_id)`."""
    names = own_parameters(method)
    return half.argument in names or (isinstance(half.argument, int) and half.argument < len(names))


def _hands_out(half: Half) -> bool:
    return _does_something(half.function) and (
        half.handle is not Handle.RESULT or returns_something(half.function)
    )


def _does_something(method: Function) -> bool:
    """It asks another, or changes something; a pool that is switched off hands out nothing."""
    changes = any(isinstance(each, ast.Assign | ast.AugAssign | ast.Delete) for each in method.statements)
    return changes or any(isinstance(each.func, ast.Attribute) for each in method.calls)
