"""What is entered under an object that was made here, and that nobody hears of: `probe = Request("probe", n)`
and `if cache.admit(probe): return True`. Nobody else can end that."""

import ast

from auditor.flow.effects import Acquisition, Handle
from auditor.project.code.bindings import given_to
from auditor.project.code.modules import Function, last_part
from auditor.project.leases.known_to_nobody import is_known_to_nobody
from auditor.project.meaning.recognise import Recogniser


def is_nobodys_key(
    recogniser: Recogniser, function: Function, call: ast.Call, acquisition: Acquisition
) -> bool:
    """The key is the object itself; by a field of it somebody else may find the entry."""
    place = acquisition.places[0]
    if acquisition.handle is not Handle.ARGUMENT or not acquisition.keyed or len(place) != 1:
        return False
    made = list(given_to(function, place[0]))
    constructed = [each for each in made if isinstance(each, ast.Call) and last_part(each.func)[:1].isupper()]
    told = {id(each) for each in call.args}
    return (
        bool(made)
        and len(constructed) == len(made)
        and is_known_to_nobody(recogniser, function, place[0], told=told)
        and not _is_returned(function, place[0])
    )


def _is_returned(function: Function, name: str) -> bool:
    answers = (node.value for node in function.statements if isinstance(node, ast.Return) and node.value)
    return any(
        isinstance(each, ast.Name) and each.id == name for value in answers for each in ast.walk(value)
    )
