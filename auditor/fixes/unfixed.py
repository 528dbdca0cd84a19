"""Why no fix could be built, in words for whoever has to repair it by hand."""

import ast
from collections.abc import Sequence

from auditor.case import Case
from auditor.fixes.exits import own_nodes
from auditor.fixes.life import LOOPS, Life, call_at, enclosing_function, life_of, mentions, statements_in
from auditor.fixes.region import is_pure
from auditor.fixes.taken_out import fixed_there, taker, where_taken
from auditor.fixes.try_finally import stands_alone

UNFIXABLE = "what to do about this rule is for the author to choose"


def why_unfixed(case: Case) -> str:
    """The first of what stands in the way that can be told; empty where nothing can."""
    if taken := where_taken(case):
        return _where_taken(case, taken)
    lease, file = case.lease, case.file
    if lease is None or file is None:
        return ""
    if lease.giving_back is None:
        return "neither the project nor the settings say how it is given back"
    if any(leak.parted for leak in lease.leaks):
        return "a part of the list is given back or kept: what is left of it is for the author to tell"
    call = call_at(file, lease.span)
    if call is None:
        return "the line is in syntax that this Python cannot parse"
    if enclosing_function(file, call) is None:
        return "it is acquired outside of any function"
    life = life_of(case, several=True)
    return _of_life(life) if life is not None else "no local name of its own stands for what was acquired"


def _where_taken(case: Case, taken: Sequence[Case]) -> str:
    """Of what a container held: of the first call that takes it out and cannot be repaired."""
    stuck = next((there for there in taken if fixed_there(there) is None), None)
    if stuck is None:
        return "it is lost at another place too, where no fix could be built"
    reason = why_unfixed(stuck)
    return f"where {taker(case, stuck)} takes it out, {reason}" if reason else ""


def _of_life(life: Life) -> str:
    holder = life.holder
    if not stands_alone(life, life.statement):
        return "other statements share the line of the acquire"
    if life.releases is None:
        return f"`{holder}` is given back within a larger expression or by a loop"
    if any(not is_pure(each, holder) for each in life.releases):
        return f"what gives `{holder}` back does more than that, so that it cannot be moved or repeated"
    if life.is_receiver:
        return f"`{holder}` is not given back in the same block, so that it may be meant to stay held"
    if life.is_several:
        return f"`{holder}` is a list of leases, whose entries are given back or handed on one by one"
    if _is_gathered(life):
        return f"`{holder}` goes into a container that is read or handed on before it is lost"
    if life.is_told:
        return f"`{holder}` may be the caller's: only where it was acquired here it is to be given back"
    if life.lease.handed_over:
        return f"on other ways out `{holder}` is handed on: only its author knows who owns it at this one"
    return f"`{holder}` is used, or may live on, beyond the block that acquires it"


def _is_gathered(life: Life) -> bool:
    """Whether a loop puts it into something."""
    loops = [each for each in statements_in(life.function.body) if isinstance(each, LOOPS)]
    return any(
        life.statement in set(statements_in(loop.body))
        and any(_puts(each, life.holder) for each in statements_in(loop.body))
        for loop in loops
    )


def _puts(statement: ast.stmt, holder: str) -> bool:
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="append" | "extend" | "add"))):
            return any(mentions(node, {holder}) for node in own_nodes(statement))
        case ast.Assign(targets=[ast.Subscript()], value=value):
            return mentions(value, {holder})
    return False
