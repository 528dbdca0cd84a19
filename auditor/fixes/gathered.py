"""Leases that a loop gathers in a list or dict: given back where the function leaves without it."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from auditor.case import Case
from auditor.facts import LEAVING, Leak, Loss
from auditor.fixes.exits import own_nodes, was_asked
from auditor.fixes.life import LOOPS, Life, block_of, enclosing_statement, life_of, new_name, statements_in
from auditor.fixes.lines import above, indentation, indented, newline_of, split, taken
from auditor.fixes.origins import Origins, innermost, origins_of
from auditor.fixes.region import region_start
from auditor.fixes.rollback import from_first_call, rollback
from auditor.fixes.try_finally import is_whole, stands_alone, unit_of
from auditor.model import Edit, FixOffer, Safety, Span


@dataclass(frozen=True)
class Gathering:
    """`name` is the container, `loop` the statement that fills it, in the block where it began empty; `added`
    are the statements that put something in, with what they put."""

    life: Life
    name: str
    loop: ast.stmt
    added: Mapping[ast.stmt, ast.expr]
    is_dict: bool

    @cached_property
    def may_lack(self) -> bool:
        """Whether the container may hold None beside leases."""
        if any(not isinstance(value, ast.Name) for value in self.added.values()):
            return True
        return self.life.is_checked and not all(was_asked(self.life, each) for each in self.added)

    def giving_back(self, margin: str, unit: str) -> list[str]:
        assert self.life.lease.giving_back is not None
        each = new_name("lease", self.life.function)
        release = self.life.lease.giving_back.call.format(each)
        head = f"{margin}for {each} in {self.name}{'.values()' if self.is_dict else ''}:"
        if not self.may_lack:
            return [head, margin + unit + release]
        return [head, f"{margin}{unit}if {each} is not None:", f"{margin}{unit}{unit}{release}"]


def gathered_given_back(case: Case) -> FixOffer | None:
    """A loop that gives them back before each return that leaves the list behind, or when the loop raises."""
    life = life_of(case)
    gathering = _gathering(life) if life is not None else None
    if life is None or gathering is None:
        return None
    leaving = [leak for leak in life.lease.leaks if leak.loss in LEAVING]
    edits = [_before_leaving(gathering, leak) for leak in leaving] if leaving else [_around(gathering)]
    found = tuple(dict.fromkeys(edit for edit in edits if edit is not None))
    if not found or None in edits:
        return None
    where = "before leaving without it" if leaving else "if the loop raises"
    return FixOffer(_safety(gathering), f"release of what `{gathering.name}` holds {where}", found)


def _safety(gathering: Gathering) -> Safety:
    """Safe: the leases go into the container and nowhere else."""
    life = gathering.life
    kept = set(gathering.added.values())
    given = (
        value
        for statement in statements_in([gathering.loop])
        for node in own_nodes(statement)
        if isinstance(node, ast.Call)
        for value in node.args
    )
    elsewhere = any(value not in kept and life.mentions(value) for value in given)
    certain = life.lease.giving_back is not None and life.lease.giving_back.certain
    return Safety.SAFE if certain and not elsewhere and not life.releases else Safety.UNSAFE


# The container ----------------------------------------------------------------------------------------------


def _gathering(life: Life) -> Gathering | None:
    """The container that the lease is put into, if nothing else is."""
    for statement in statements_in(life.function.body):
        name, value = _put(statement) if statement.lineno > life.statement.lineno else ("", None)
        if not name or not isinstance(value, ast.Name) or value.id != life.holder:
            continue
        beginning = _beginning(life, name)
        loop = _loop_after(life, beginning) if beginning is not None else None
        if beginning is not None and loop is not None:
            added = {each: put for each in statements_in([loop]) for own, put in [_put(each)] if own == name}
            alike = all(put is not None and _is_lease_or_none(life, put) for put in added.values())
            is_dict = _is_empty_dict(beginning)
            known = {each: put for each, put in added.items() if put is not None}
            return Gathering(life, name, loop, known, is_dict) if alike else None
    return None


def _put(statement: ast.stmt) -> tuple[str, ast.expr | None]:
    """The name of the container that a statement adds to, and what it adds; an empty name for others."""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=args)):
            return name, args[0] if len(args) == 1 else None
        case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=name))], value=value):
            return name, value
    return "", None


def _beginning(life: Life, name: str) -> ast.stmt | None:
    """The one statement that binds the name, to an empty list or dict."""
    bound = [each for each in statements_in(life.function.body) if _binds(each, name)]
    empty = len(bound) == 1 and (_is_empty_list(bound[0]) or _is_empty_dict(bound[0]))
    return bound[0] if empty else None


def _loop_after(life: Life, beginning: ast.stmt) -> ast.stmt | None:
    """The loop around the acquire that stands in the block where the container began empty."""
    block = list(block_of(life.file, beginning))
    later = block[block.index(beginning) + 1 :]
    loop = next((each for each in later if life.statement in set(statements_in([each]))), None)
    return loop if isinstance(loop, LOOPS) else None


def _binds(statement: ast.stmt, name: str) -> bool:
    return any(
        isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load)
        for node in own_nodes(statement)
    )


def _is_empty_list(statement: ast.stmt) -> bool:
    match getattr(statement, "value", None):
        case ast.List(elts=[]) | ast.Call(func=ast.Name(id="list"), args=[], keywords=[]):
            return isinstance(statement, (ast.Assign, ast.AnnAssign))
    return False


def _is_empty_dict(statement: ast.stmt) -> bool:
    match getattr(statement, "value", None):
        case ast.Dict(keys=[]) | ast.Call(func=ast.Name(id="dict"), args=[], keywords=[]):
            return isinstance(statement, (ast.Assign, ast.AnnAssign))
    return False


def _is_lease_or_none(life: Life, value: ast.expr) -> bool:
    if isinstance(value, ast.Constant):
        return value.value is None
    return isinstance(value, ast.Name) and value.id == life.holder


def _is_whole_until(gathering: Gathering, line: int) -> bool:
    """Whether up to that line the container is only filled, counted and returned: all in it is still owed."""
    return not any(
        _is_name(node, gathering.name) and node.lineno < line and not _is_harmless(gathering, node)
        for node in ast.walk(gathering.life.function)
        if isinstance(node, ast.Name)
    )


def _is_harmless(gathering: Gathering, name: ast.Name) -> bool:
    if isinstance(name.ctx, ast.Store):
        return True  # there is one such statement, which makes the container
    file = gathering.life.file
    match file.parents[name]:
        case ast.Attribute() | ast.Subscript():
            return enclosing_statement(file, name) in gathering.added
        case ast.Call(func=ast.Name(id="len" | "bool")):
            return True
        case ast.Return() | ast.UnaryOp(op=ast.Not()):
            return True
        case ast.If(test=test) | ast.While(test=test):
            return test is name
    return False


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


# The edits --------------------------------------------------------------------------------------------------


def _before_leaving(gathering: Gathering, leak: Leak) -> Edit | None:
    """In front of the `return` of this leak."""
    life = gathering.life
    statement = innermost(life, leak.at.line)
    if not isinstance(statement, ast.Return) or not stands_alone(life, statement):
        return None
    if statement.lineno < gathering.loop.lineno or not _is_whole_until(gathering, statement.lineno):
        return None
    if any(_is_name(node, gathering.name) for node in ast.walk(statement)):
        return None
    if not _is_listed(leak) and statement.lineno > life.statement.lineno:
        return None  # the lease of this turn is not in the list yet
    margin = indentation(life.file.lines[statement.lineno - 1])
    return above(life.file, statement, gathering.giving_back(margin, unit_of(life)))


def _is_listed(leak: Leak) -> bool:
    return leak.holder.endswith("[*]")


def _around(gathering: Gathering) -> Edit | None:
    """`except BaseException:` around the loop, where its checks lose what earlier turns have gathered."""
    life, loop = gathering.life, gathering.loop
    origins = origins_of(life.lease.leaks)
    last = loop.end_lineno or loop.lineno
    if origins is None or origins.caught or not all(loop.lineno < line <= last for line in origins.lines):
        return None
    inside = [
        leak for leak in life.lease.leaks if leak.loss is Loss.RAISE and not leak.holder.endswith("[*]")
    ]
    if any(leak.at.line > life.statement.lineno for leak in inside) or not is_whole(life.file, loop):
        return None
    if not _is_whole_until(gathering, last + 1):
        return None
    return _tried(gathering, last)


def _tried(gathering: Gathering, last: int) -> Edit | None:
    life, first = gathering.life, gathering.loop.lineno
    file, unit, newline = life.file, unit_of(life), newline_of(life.file)
    lines = _with_this_turns(gathering, taken(file, first, last))
    deeper = indented(lines, unit) if lines is not None else None
    if deeper is None:
        return None
    margin = indentation(file.lines[first - 1])
    text = [
        f"{margin}try:",
        "".join(deeper).rstrip("\r\n"),
        f"{margin}except BaseException:",
        *gathering.giving_back(margin + unit, unit),
        f"{margin}{unit}raise",
    ]
    return Edit(Span(file.path, first, 1, last, len(file.lines[last - 1]) + 1), newline.join(text))


def _with_this_turns(gathering: Gathering, lines: list[str]) -> list[str] | None:
    """The loop's lines, with a rollback of what this turn has acquired and not put in yet, if one is due."""
    life = gathering.life
    start = region_start(life)
    adding = next((each for each in gathering.added if each.lineno > life.statement.lineno), None)
    if start is None or adding is None or adding not in start[0]:
        return None
    block, index = start
    between = from_first_call(block[index : list(block).index(adding)])
    if not between:
        return lines
    edit = rollback(life, between, Origins((), caught=True))
    if edit is None:
        return None
    before, after = edit.span.line - gathering.loop.lineno, edit.span.end_line + 1 - gathering.loop.lineno
    return [*lines[:before], *split(edit.replacement + newline_of(life.file)), *lines[after:]]
