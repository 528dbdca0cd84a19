"""Pools that hand out several of their things at once: `first = self.idle.pop()`, `second = self.idle.pop()`,
`return first, second`. Each of them is a lease of its own, and so lies where it is in the tuple."""

import ast
import re
from collections.abc import Iterable
from dataclasses import replace

from auditor.flow.effects import Value
from auditor.project.code.bindings import given_to, ways
from auditor.project.code.modules import Function
from auditor.project.meaning.source import Source
from auditor.project.shapes.pool_state import own_parameters, own_state

TAKING = frozenset({"pop", "popleft", "heappop"})


def each_taken(function: Function, source: Source) -> Source:
    """What is known of the function's result, said of each of them: where one is there, so are the others."""
    items = [f"[{index}]" for index in range(_taken_at_once(function))]
    there = source.flags.union((f"{item} is None", False) for item in items)
    if source.value is not Value.INDEX:
        there = there.union((item, True) for item in items)
    apart = [replace(source, rest=(item,), flags=there) for item in items]
    return replace(apart[0], also=tuple(apart[1:])) if len(apart) > 1 else source


def in_a_list(function: Function, ends: Iterable[Function], source: Source) -> Source:
    """The lease is each of what `take_group(n) -> list[Lease]` returns, where `give(lease: Lease)` is told
    one."""
    returns = getattr(function.node, "returns", None)
    match returns:
        case ast.Subscript(value=ast.Name(id="list" | "List" | "Sequence"), slice=element) if not source.rest:
            one = ast.unparse(element)
            each = [_annotated(end) for end in ends]
            if each and all(told == one for told in each):
                return replace(source, rest=("[*]",))
    return source


def _annotated(end: Function) -> str:
    """How the first of what it is told is annotated."""
    own = own_parameters(end)[:1]
    arguments = getattr(end.node, "args", None)
    named = [*arguments.posonlyargs, *arguments.args] if isinstance(arguments, ast.arguments) else []
    return next((ast.unparse(arg.annotation) for arg in named if arg.arg in own and arg.annotation), "")


def _taken_at_once(function: Function) -> int:
    """How many are in the tuple or list, where every return of one that says anything has as many."""
    returned = (node.value for node in function.statements if isinstance(node, ast.Return))
    listed = (each for each in returned if isinstance(each, ast.Tuple | ast.List))
    tuples = [each.elts for each in listed if not _says_none(each)]
    sizes = {len(parts) for parts in tuples}
    every = all(_is_taken(function, part) for parts in tuples for part in parts)
    return sizes.pop() if every and len(sizes) == 1 else 0


def _says_none(answer: ast.Tuple | ast.List) -> bool:
    """Not by an empty list, which callers may measure."""
    return isinstance(answer, ast.Tuple) and all(isinstance(part, ast.Constant) for part in answer.elts)


def _is_taken(function: Function, part: ast.expr) -> bool:
    """`self.idle.pop()`, or a name for that and nothing else, unless it is None."""
    match part:
        case ast.Name(id=name):
            given = [way for value in given_to(function, name) for way in ways(value)]
            given = [way for way in given if getattr(way, "value", way) is not None]
            return (
                bool(given)
                and not any(isinstance(each, ast.Name) for each in given)
                and all(_is_taken(function, each) for each in given)
            )
        case ast.Call(func=ast.Attribute(value=store, attr=method)) if method in TAKING:
            return own_state(store, function.owner) or any(
                own_state(each, function.owner) for each in part.args[:1]
            )
    return False


LISTS = re.compile(
    r"""['"]?(?:Optional\[)?(?:[Ll]ist\[int\]|(?:torch\.)?Tensor\b|(?:np\.|numpy\.)?ndarray\b)"""
)
"""Annotations of several numbers in one result."""


SEQUENCES = re.compile(r"""['"]?(?:(?:typing\.)?Optional\[)?(?:typing\.)?(?:[Ll]ist|Sequence|[Dd]eque)\[""")


def hands_out_things_in_a_list(function: Function) -> bool:
    """The same of whatever it hands out."""
    returns = getattr(function.node, "returns", None)
    said = returns is not None and SEQUENCES.match(ast.unparse(returns)) is not None
    return said or hands_out_a_list(function)


def hands_out_a_list(function: Function) -> bool:
    """It says so, or every result that is one is a slice of what it has or a list made on the spot."""
    returns = getattr(function.node, "returns", None)
    if returns is not None:
        return LISTS.match(ast.unparse(returns)) is not None
    returned = [node.value for node in function.statements if isinstance(node, ast.Return) and node.value]
    given = [way for value in returned for each in _spelled_out(function, value) for way in ways(each)]
    results = [each for each in given if not (isinstance(each, ast.Constant) and each.value is None)]
    return bool(results) and all(map(_is_list, results))


def _spelled_out(function: Function, value: ast.expr) -> list[ast.expr]:
    found = list(given_to(function, value.id)) if isinstance(value, ast.Name) else []
    return found or [value]


def _is_list(value: ast.expr) -> bool:
    sliced = isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Slice)
    return sliced or isinstance(value, ast.ListComp)
