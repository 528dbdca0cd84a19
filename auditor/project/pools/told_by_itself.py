"""What a pool's objects tell it themselves when they are over: nobody who got one owes anything.

`gt.link(self._spawn_done)`; `self.group._task_done(self)` in the task's own body; `Response(Stream(self))`,
whose stream tells the private end when it is closed."""

import ast
from collections.abc import Iterator, Sequence

from auditor.project.code.bindings import TEST_FILE, assignments
from auditor.project.code.class_model import ClassModel
from auditor.project.code.modules import Function, Module, last_part
from auditor.project.pools.bodies import ends_when_it_is_done
from auditor.project.pools.used_together import MOST
from auditor.project.shapes.field_work import field_work
from auditor.protocols.vocabulary import LEASE_METHODS, RELEASE_WORDS, take_apart
from auditor.source.nodes import walk

Asking = tuple[Function, ast.Call]


def told_by_itself(model: ClassModel, begins: Function, ends: Sequence[Function]) -> bool:
    """Whether none of those who call the ends has got what `begins` lends from it."""
    if ends_when_it_is_done(begins, ends):
        return True
    if begins.name.startswith("_"):
        return False
    private = all(end.name.startswith("_") for end in ends)
    if private and _knows_its_maker(begins):
        return True
    if any(len(model.project.calling(end.name)) > MOST for end in ends):
        return False  # so many do not all end themselves
    asking = [each for end in ends for each in _asking(model, end)]
    return bool(asking) and all(
        _tells_of_itself(function, call) and not _is_ended_by_users(model, begins, function)
        for function, call in asking
    )


def _asking(model: ClassModel, end: Function) -> Iterator[Asking]:
    """Calls of it outside its class, and not by what stands in for it."""
    for module in _modules(model, end):
        for function in module.by_node.values() if f".{end.name}(" in module.text else ():
            if function.cls is not end.cls and function.name != end.name:
                yield from ((function, call) for call in function.calling(end.name))


def _modules(model: ClassModel, end: Function) -> Iterator[Module]:
    yield end.module
    for path in model.project.calling(end.name):
        if path != end.module.path and (module := model.project.module(path)) is not None:
            yield module


def _tells_of_itself(function: Function, call: ast.Call) -> bool:
    """`self.group._task_done(self)`; a method called `close()` that does so is what its users call."""
    if [getattr(arg, "id", "") for arg in call.args] != [function.owner]:
        return False
    name = function.name
    named = name in LEASE_METHODS or take_apart(name, RELEASE_WORDS) is not None
    return not (named or name.startswith("__"))


def _is_ended_by_users(model: ClassModel, begins: Function, telling: Function) -> bool:
    """`lease = pool.lease()` and `lease.finish()` in most functions that get one, tests left out: it is no
    end of its own that it tells."""
    ended = [
        any(_is_named_in(call, names) for call in function.calling(telling.name))
        for module in _modules(model, begins)
        if not TEST_FILE.search(module.path)
        for function in module.by_node.values()
        if function.cls is not telling.cls and (names := _names_given_by(function, begins))
    ]
    return sum(ended) * 2 >= max(len(ended), 1)


def _names_given_by(function: Function, begins: Function) -> set[str]:
    """What the function calls those that it gets."""
    given = ((to.id, value) for to, value in assignments(function) if isinstance(to, ast.Name))
    return {to for to, got in given if isinstance(got, ast.Call) and last_part(got.func) == begins.name}


def _is_named_in(call: ast.Call, names: set[str]) -> bool:
    return isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", None) in names


def _knows_its_maker(begins: Function) -> bool:
    """`return Response(status, Stream(self, stream_id))`: closing it tells this object's end, whatever its
    methods are called. What is `Pass(self)` itself has the methods that end it."""
    return any(
        isinstance(arg, ast.Name) and arg.id == begins.owner
        for value in field_work(begins).returned
        for call in walk(value)
        if isinstance(call, ast.Call) and call is not value
        for arg in (*call.args, *(each.value for each in call.keywords))
    )
