"""Calls that give something back, by their names."""

import ast
import re
from collections.abc import Set

from auditor.project.code.modules import last_part
from auditor.protocols.vocabulary import LEASE_METHODS, RELEASING, REMOVING

ENDING = re.compile(
    r"close|stop|shut|hang_?up|releas|free|(?<![a-z])end(?:_|$)|finish|termin|disconn|quit|exit|destroy|dispos|clean|kill|join|abort"
    r"|cancel|drop|done|return|give|put_?back|recycl|complet|detach|leave|unload|evict|reset|clear|delet|remov|del_"
)
"""What the names of methods hold that end the object which they are called on."""


def joins_texts(call: ast.Call) -> bool:
    """`os.path.join(root, name)`, `", ".join(names)`: no end, whatever `thread.join()` is."""
    match call.func:
        case ast.Attribute(value=ast.Constant(value=str()), attr="join"):
            return True
        case ast.Attribute(value=ast.Attribute(attr="path") | ast.Name(id="path" | "posixpath"), attr="join"):
            return True
    return False


def looks_releasing(call: ast.Call) -> bool:
    """By its name it gives something back, or sees to it that somebody will."""
    name = last_part(call.func)
    return (
        RELEASING.fullmatch(name) is not None
        or name in LEASE_METHODS
        or name in ("finalize", "callback", "map")
        or REMOVING.fullmatch(name) is not None
    )


def is_an_end(call: ast.Call, ends: Set[str]) -> bool:
    """By the names of what ends such a lease. Of a declared protocol none are known: what looks like an end
    will do."""
    return last_part(call.func) in ends if ends else looks_releasing(call)
