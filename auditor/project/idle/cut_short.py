"""Lists of what was taken, of which a method hands out whole groups or the best one and forgets the rest."""

import ast
from collections.abc import Iterator

from auditor.project.code.bindings import given_to
from auditor.project.code.modules import Function
from auditor.project.idle.charges import is_cut
from auditor.project.idle.setting import TakenHere
from auditor.source.nodes import walk


def cut_short(here: TakenHere) -> ast.AST | None:
    """The `return got[:len(got) - len(got) % 4]`, `return max(got, key=score)` by which all that is left of
    them goes; None where something else has to do with them."""
    names = {here.take.name, *_given_by(here)} - {""}
    for append in here.function.calls:
        match append:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=box), attr="append"), args=[ast.Name(id=name)]
            ) if name in names and here.is_box(box):
                parted = _parted(here.function, box)
                if (
                    parted
                    and _only(here, name, [here.take.at, append])
                    and _only(here, box, [append, *parted])
                ):
                    return parted[0]
    return None


def _given_by(here: TakenHere) -> Iterator[str]:
    for node in here.function.statements:
        if isinstance(node, ast.Assign) and any(each is here.take.shown for each in walk(node.value)):
            yield from (each.id for each in walk(node.targets[0]) if isinstance(each, ast.Name))


def _parted(function: Function, box: str) -> list[ast.AST]:
    """The `return`, and what chooses if that has a name."""
    for node in function.statements:
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Name):
            given = list(given_to(function, node.value.id))
            if len(given) == 1 and _chooses(function, given[0], box):
                return [node, given[0]]
        elif isinstance(node, ast.Return) and node.value and _chooses(function, node.value, box):
            return [node]
    return []


def _chooses(function: Function, value: ast.expr, box: str) -> bool:
    """`got[:whole]`, `min(got, key=size)`. Without a key the lowest may stand for all."""
    match value:
        case ast.Subscript(value=ast.Name(id=name), slice=ast.Slice(lower=None, upper=ast.expr() as end)):
            given = list(given_to(function, end.id)) if isinstance(end, ast.Name) else [end]
            return name == box and len(given) == 1 and is_cut(given[0], _length(box))
        case ast.Call(func=ast.Name(id="min" | "max"), args=[ast.Name(id=name)], keywords=[ast.keyword()]):
            return name == box and value.keywords[0].arg == "key"
    return False


def _length(box: str) -> ast.expr:
    return ast.Call(ast.Name("len", ast.Load()), [ast.Name(box, ast.Load())], [])


def _only(here: TakenHere, name: str, where: list[ast.AST]) -> bool:
    """Whether nothing but these, conditions, and what asks for its length reads the name."""
    measured = [node for node in here.function.calls if ast.dump(node) == ast.dump(_length(name))]
    harmless = set(here.tests).union(id(part) for at in (*where, *measured) for part in walk(at))
    return all(
        id(node) in harmless
        for node in here.function.nodes
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
    )
