"""Methods that begin a pool anew, and empty a table of what it lent: `self.slots.vacate_all()`,
`self.live.clear()`."""

import ast

from auditor.project.code.bindings import own_attribute
from auditor.project.code.modules import Function
from auditor.project.meaning.recognise import Recogniser
from auditor.project.outcome import Outcome


def begins_its_pool_anew(recogniser: Recogniser, outcome: Outcome, method: Function) -> bool:
    """Whether the method calls what takes back all that the pool of this lease has lent."""
    renewing = recogniser.renewing(outcome.acquisition.protocol)
    names = {each.name for each in renewing}
    return bool(names) and any(
        not renewing.isdisjoint(recogniser.calls.targets(method, call)[0])
        for call in method.calls
        if isinstance(call.func, ast.Attribute) and call.func.attr in names
        if not _is_of_another(outcome, method, call.func.value)
    )


def _is_of_another(outcome: Outcome, method: Function, asked: ast.expr) -> bool:
    """`self.rows.reset()` of what `self.slots` has lent, both fields of one object."""
    lender = outcome.call.func
    if not isinstance(lender, ast.Attribute) or method.cls is not outcome.function.cls:
        return False
    own = own_attribute(lender.value, outcome.function.owner or ""), own_attribute(asked, method.owner or "")
    return None not in own and own[0] != own[1]
