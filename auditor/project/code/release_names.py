"""Calls that give something back, by their names."""

import ast

from auditor.project.code.modules import last_part
from auditor.protocols.vocabulary import LEASE_METHODS, RELEASING, REMOVING


def looks_releasing(call: ast.Call) -> bool:
    """By its name it gives something back, or sees to it that somebody will."""
    name = last_part(call.func)
    return (
        RELEASING.fullmatch(name) is not None
        or name in LEASE_METHODS
        or name in ("finalize", "callback", "map")
        or REMOVING.fullmatch(name) is not None
    )
