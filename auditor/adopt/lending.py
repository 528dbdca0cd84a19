"""The pool of a module lent to a function beside it: a keyword-only parameter at the function's end.

Its default is plain torch memory, so that whoever else calls the function notices nothing.
"""

from auditor.adopt.constructor import last_parameter, with_keywords
from auditor.adopt.draft import Draft
from auditor.adopt.helpers import LEASE, PARAMETER, PLAIN, Call
from auditor.adopt.listing import Listing
from auditor.adopt.uses import Function


def with_lender(draft: Draft, helper: Function) -> Draft:
    """The function with the parameter at its end."""
    opened = draft.lines[helper.lineno - 1].index("(") + 1
    star = [] if helper.args.kwonlyargs or helper.args.vararg else ["*"]
    at = last_parameter(draft, helper)
    return Listing(draft, (helper.lineno, opened), at).with_items([*star, f"{PARAMETER}={PLAIN}"])


def lent(draft: Draft, call: Call) -> Draft:
    """The call with the pool of the object lent to the function."""
    return with_keywords(draft, call.call, [f"{PARAMETER}={call.me}.{LEASE}"])
