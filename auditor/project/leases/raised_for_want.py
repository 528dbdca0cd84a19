"""Acquires that raise, in so many words, where there is nothing to lend: `raise PoolEmpty` in the pool, or in
what it asks. Whoever holds something already and asks for more is told of it that way."""

import ast
import re
from collections.abc import Iterator

from auditor.project.code.bindings import assignments
from auditor.project.code.modules import Function, last_part
from auditor.project.meaning.recognise import Recogniser
from auditor.project.meaning.summaries import said_absent
from auditor.project.meaning.written_raises import Raised, begins_later, is_own, says_none
from auditor.source.nodes import walk

MISUSE = re.compile(r"Clos|Shut|Stop|Invalid|Illegal|Unknown|Bad[A-Z]|Corrupt|Cancel")
"""What is wrong with the question, with what lies on a disk, or with a pool that is no more, is no want."""

OF_ALL_KINDS = re.compile(r"([A-Z][a-z]+)Error")
"""`StoreError` is raised in `metastore.py` for whatever may be wrong with the store."""

COUNTING = re.compile(r"^_?(?:can|could|has|fits|is_full|enough)(?:_|$)|room|avail|free|headroom")
"""Questions whether there is enough."""


def raises_for_want(
    recogniser: Recogniser, function: Function, call: ast.Call, protocol: str, *, gathered: bool = False
) -> bool:
    """Whether this call of an acquire may raise so, and no handler around it is for any of what it raises;
    be it where a coroutine is `gathered` with others."""
    lending = list(_lending(recogniser, function, call, protocol))
    if len(lending) != 1 or (not gathered and begins_later(function, lending[0], call)):
        return False
    if says_none(lending[0]) or _counted_before(function, call) or _expects_none(function, call):
        return False
    raised = recogniser.written_raises.by(lending[0])
    foreseen = raised != recogniser.written_raises.uncaught(function, call, raised)
    return not foreseen and any(_is_for_want(each, lending[0].module.path) for each in raised)


def gathered_beside(gather: ast.Call, call: ast.Call) -> Iterator[ast.Call]:
    """What may fail while the call has got something: those beside it, itself where there are many of it;
    nothing where `return_exceptions` lets all of them come to an end."""
    if last_part(gather.func) != "gather" or any(each.arg == "return_exceptions" for each in gather.keywords):
        return
    inside = [node for arg in gather.args for node in walk(arg)]
    if any(node is call for node in inside):
        repeated = {
            id(node)
            for each in inside
            if isinstance(each, ast.GeneratorExp | ast.ListComp)
            for node in walk(each.elt)
        }
        for node in inside:
            if isinstance(node, ast.Call) and (node is not call or id(call) in repeated):
                yield node


def _is_for_want(raised: Raised, path: str) -> bool:
    broad = OF_ALL_KINDS.fullmatch(raised[0])
    if broad is not None and broad[1].lower() in path.rpartition("/")[2]:
        return False
    return is_own(raised) and MISUSE.search(raised[0]) is None


def _lending(recogniser: Recogniser, function: Function, call: ast.Call, protocol: str) -> Iterator[Function]:
    """What the call reaches; where only its name and its protocol are known, the half so called."""
    targets, constructed, _ = recogniser.calls.targets(function, call)
    if targets or constructed is not None:
        known = () if constructed is not None else targets
        yield from (each for each in known if each in recogniser.acquiring or each in recogniser.wrappers)
        return
    for half, (pair, _) in recogniser.acquiring.items():
        if pair.name == protocol and half.name == last_part(call.func):
            yield half


def _expects_none(function: Function, call: ast.Call) -> bool:
    """`row = pool.take()`, `if row is None: break`: whoever wrote that thinks of no other answer."""
    named = {
        target.id
        for target, value in assignments(function)
        if isinstance(target, ast.Name) and (value.value if isinstance(value, ast.Await) else value) is call
    }
    asked = (node.test for node in function.statements if isinstance(node, ast.If))
    return any(said_absent(test) in named for test in asked) if named else False


def _counted_before(function: Function, call: ast.Call) -> bool:
    """`if self.pool.num_free < need: return False`, `if self.can_allocate(need):`: there is enough for all of
    them."""
    asking = (node for node in function.statements if isinstance(node, ast.If | ast.While | ast.Assert))
    tests = [node.test for node in asking if node.test.lineno <= call.lineno]
    asked = (node for test in tests for node in walk(test) if isinstance(node, ast.Call))
    if any(COUNTING.search(last_part(each.func)) for each in asked):
        return True
    if not isinstance(call.func, ast.Attribute):
        return False
    pool = ast.unparse(call.func.value)
    compared = (
        part for test in tests for node in walk(test) if isinstance(node, ast.Compare) for part in walk(node)
    )
    return any(isinstance(part, ast.Attribute) and ast.unparse(part.value) == pool for part in compared)
