"""A release on the ways out that skip it: before the return, raise, continue or break that leaves with the
lease."""

import ast
from collections.abc import Iterator, Sequence

from auditor.case import Case
from auditor.facts import LEAVING, Leak, Loss
from auditor.fixes.escape import Carriers
from auditor.fixes.life import (
    EXITS,
    SCOPES,
    Life,
    block_of,
    goes_on_with,
    leaves,
    life_of,
    mentions,
    says_held,
    statements_in,
    turns_back_if_none,
)
from auditor.fixes.lines import indentation, indented, newline_of, taken
from auditor.fixes.try_finally import giving_back, stands_alone, unit_of
from auditor.flow.effects import Value
from auditor.model import Edit, FixOffer, Safety, Span


def released_on_exit(case: Case) -> FixOffer | None:
    """A release before every exit that the finding is about; None if one of them cannot be told apart."""
    life = life_of(case)
    if life is None or life.releases is None:
        return None
    ordinary = [leak for leak in life.lease.leaks if leak.loss in LEAVING]
    raising = [leak for leak in life.lease.leaks if leak.loss is Loss.RAISE]
    exits = _exits(life, ordinary or raising)
    if not exits or None in exits:
        return None
    if ordinary:
        exits += [each for each in _exits(life, raising) if each is not None and each not in exits]
    safety = _safety(life, exits)
    if safety is None:
        return None
    edits = [release_before(life, each) for each in exits if each is not None]
    found = [edit for edit in edits if edit is not None]
    if len(found) < len(edits):
        return None
    return FixOffer(safety, _described(life, exits), tuple(found))


def _described(life: Life, exits: Sequence[ast.stmt | None]) -> str:
    lines = sorted(each.lineno for each in exits if each is not None)
    place = f"line {lines[0]}" if len(lines) == 1 else f"lines {', '.join(map(str, lines))}"
    return f"release of `{life.holder}` before leaving at {place}"


def _safety(life: Life, exits: Sequence[ast.stmt | None]) -> Safety | None:
    """Safe: the analysis says that it is held there, and nothing of it is returned."""
    assert life.lease.giving_back is not None
    known = life.lease.giving_back.certain or bool(life.releases)
    carriers = Carriers(life.holder, life.lease.value, life.function.body)
    escapes = any(
        isinstance(each, ast.Return) and each.value is not None and carriers.carries(each.value)
        for each in exits
    )
    if escapes and life.lease.value is not Value.TENSOR:
        return None
    return Safety.SAFE if known and not escapes else Safety.UNSAFE


# Which exits ------------------------------------------------------------------------------------------------


def _exits(life: Life, leaks: Sequence[Leak]) -> list[ast.stmt | None]:
    """The exit statement of each leak, each once; None for one that is not an exit of its own."""
    return list(dict.fromkeys(_exit_of(life, leak) for leak in leaks))


def _exit_of(life: Life, leak: Leak) -> ast.stmt | None:
    """The statement by which this leak leaves, if only paths that hold the lease go by it."""
    if leak.holder.endswith("[*]") and not life.is_several:
        return None  # what a container holds is not what the name means by then
    found = _statement_of(life, leak)
    return found if found is not None and always_holds(life, found) else None


def _statement_of(life: Life, leak: Leak) -> ast.stmt | None:
    places = [(leak.at.line, leak.at.column)]
    if leak.loss in (Loss.FALL_THROUGH, Loss.NEXT_TURN):
        jumps = ("goes on with the next turn", "leaves the loop")
        places = [(step.line, step.column) for step in leak.trace if step.note in jumps][-1:]
    for statement in statements_in(life.function.body):
        if isinstance(statement, EXITS):
            span = life.file.span(statement)
            if (span.line, span.column) in places:
                return statement
    return None


def always_holds(life: Life, statement: ast.stmt) -> bool:
    """Whether nothing before `statement` can have ended the lease and still go on to it."""
    node: ast.AST = statement
    asked = False
    while node is not life.function:
        parent = life.file.parents[node]
        block = block_of(life.file, node) if isinstance(node, ast.stmt) else ()
        for before in _before(node, block):
            if _may_end(life, before):
                return False
            if before is life.statement or _runs_through(life, before) or (asked and _holds(before, life)):
                return True
            asked = asked or turns_back_if_none(before, life.holder)
        if isinstance(node, ast.ExceptHandler) or (isinstance(parent, ast.Try) and node in parent.orelse):
            body = parent.body if isinstance(parent, (ast.Try, ast.TryStar)) else []
            if any(_may_end(life, each) for each in body) or life.statement in set(statements_in(body)):
                return False
        node = parent
    return False


def _runs_through(life: Life, statement: ast.stmt) -> bool:
    """Whether the acquire is a statement of this `with`, which runs whenever what comes after it does."""
    if not isinstance(statement, ast.With | ast.AsyncWith):
        return False
    return any(each is life.statement or _runs_through(life, each) for each in statement.body)


def _holds(statement: ast.stmt, life: Life) -> bool:
    """Whether the acquire is somewhere within, and the holder is a lease or None after it."""
    inner = [] if life.is_receiver else list(statements_in([statement]))
    others = [each for each in statements_in(life.function.body) if each is not life.statement]
    bound = [each for each in others if any(_stores(node, life.holder) for node in own_nodes(each))]
    return life.statement in inner and all(_is_none(each) for each in bound)


def _stores(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)


def _is_none(statement: ast.stmt) -> bool:
    value = getattr(statement, "value", None)
    return isinstance(value, ast.Constant) and value.value is None


def _before(node: ast.AST, block: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """What stands before `node` in its block, the nearest first."""
    if isinstance(node, ast.stmt) and block:
        yield from reversed(block[: list(block).index(node)])


def _may_end(life: Life, statement: ast.stmt) -> bool:
    """Whether the lease may end in `statement`, which may yet be left in the ordinary way."""
    if statement is life.statement:
        return False
    if isinstance(statement, SCOPES):
        return life.lease.handed_over and life.mentions(statement)
    inner = [each for each in statements_in([statement]) if each is not life.statement]
    endings = [each for each in inner if _ends(life, each)]
    return any(not _then_leaves(life, each, statement) for each in endings)


def _ends(life: Life, statement: ast.stmt) -> bool:
    if statement in (life.releases or ()) or any(
        isinstance(target, ast.Name) and target.id == life.holder and not isinstance(target.ctx, ast.Load)
        for target in own_nodes(statement)
    ):
        return True
    return life.lease.handed_over and gives_away(statement, life.holder)


def gives_away(statement: ast.stmt, holder: str) -> bool:
    """Whether the statement itself passes the lease to a call, stores it, or returns it."""
    for node in own_nodes(statement):
        match node:
            case ast.Call(args=args, keywords=keywords):
                given = [*args, *(keyword.value for keyword in keywords)]
                if any(mentions(value, {holder}) for value in given):
                    return True
            case ast.Yield(value=ast.expr() as value) if mentions(value, {holder}):
                return True
    match statement:
        case (
            ast.Return(value=ast.expr() as value)
            | ast.Assign(value=value)
            | ast.AnnAssign(value=ast.expr() as value)
        ):
            return mentions(value, {holder})
    return False


def own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """The expressions of a statement, without the statements in its blocks."""
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, (ast.expr, ast.withitem)):
            yield from ast.walk(child)


def _then_leaves(life: Life, ending: ast.stmt, within: ast.stmt) -> bool:
    """Whether what follows the ending leaves `within`."""
    last = _last_after(life, ending, within)
    return isinstance(last, EXITS) and leaves(last, [within])


def _last_after(life: Life, statement: ast.stmt, within: ast.stmt) -> ast.stmt:
    """The end of the statement's block, or of the one around if there it only stands under a condition."""
    block = () if isinstance(statement, EXITS) else block_of(life.file, statement)
    last, outer = block[-1] if block else statement, life.file.parents[statement]
    if isinstance(last, EXITS) or within in (statement, outer) or not isinstance(outer, ast.If):
        return last
    return _last_after(life, outer, within)


# The release ------------------------------------------------------------------------------------------------


def release_before(life: Life, statement: ast.stmt) -> Edit | None:
    """The edit that releases and then leaves."""
    file = life.file
    carriers = Carriers(life.holder, life.lease.value, life.function.body)
    value = statement.value if isinstance(statement, ast.Return) else None
    reads = value is not None and mentions(value, carriers.names)
    if not stands_alone(life, statement):
        return None if reads else _on_lines_of_its_own(life, statement)
    margin, unit = indentation(file.lines[statement.lineno - 1]), unit_of(life)
    newline = newline_of(file)
    if not reads:
        release = _release(life, statement, margin, unit)
        place = Span(file.path, statement.lineno, 1, statement.lineno, 1)
        return Edit(place, "".join(line + newline for line in release))
    last = statement.end_lineno or statement.lineno
    body = indented(taken(file, statement.lineno, last), unit)
    if body is None:
        return None
    release = _release(life, statement, margin + unit, unit)
    lines = [f"{margin}try:", "".join(body).rstrip("\r\n"), f"{margin}finally:", *release]
    place = Span(file.path, statement.lineno, 1, last, len(file.lines[last - 1]) + 1)
    return Edit(place, newline.join(lines))


def _release(life: Life, statement: ast.stmt, margin: str, unit: str) -> list[str]:
    """Asking whether there is a lease, unless the code before has asked."""
    return giving_back(life, margin, unit, asked=was_asked(life, statement))


def was_asked(life: Life, statement: ast.stmt) -> bool:
    """Whether something between the acquire and this statement turns back where there is no lease."""
    node: ast.AST = statement
    while node is not life.function:
        block = block_of(life.file, node) if isinstance(node, ast.stmt) else ()
        for before in _before(node, block):
            if before.lineno <= life.statement.lineno:
                break
            if goes_on_with(before, life.holder):
                return True
        parent = life.file.parents[node]
        if isinstance(parent, ast.If) and node in parent.body and says_held(parent.test, life.holder):
            return True
        if life.statement in set(block):
            return False
        if any(_runs_through(life, before) and _turns_back(life) for before in _before(node, block)):
            return True
        node = parent
    return False


def _turns_back(life: Life) -> bool:
    """Whether the acquire's own block goes on only with a lease."""
    return any(turns_back_if_none(each, life.holder) for each in life.block[life.index + 1 :])


def _on_lines_of_its_own(life: Life, statement: ast.stmt) -> Edit | None:
    """`if skip: return` becomes a block."""
    file = life.file
    span, head = file.span(statement), file.lines[statement.lineno - 1]
    before, after = head[: span.column - 1], head[span.end_column - 1 :].strip()
    parent = file.parents[statement]
    plain = before.rstrip().endswith(":") and getattr(parent, "lineno", 0) == statement.lineno
    if not plain or span.line != span.end_line or (after and not after.startswith("#")):
        return None
    if len(block_of(file, statement)) > 1:
        return None
    margin, unit, newline = indentation(head), unit_of(life), newline_of(file)
    release = _release(life, statement, margin + unit, unit)
    text = newline + "".join(line + newline for line in release) + margin + unit
    return Edit(Span(file.path, span.line, len(before.rstrip()) + 1, span.line, span.column), text)
