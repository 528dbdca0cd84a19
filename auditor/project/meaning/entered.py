"""Leases that are entered by `with` and are as much owed behind it: leaving a stream ends its use, not its
loan."""

import ast

from auditor.project.code.modules import Class
from auditor.project.meaning.recognise import Recogniser


def owed_behind_its_with(recogniser: Recogniser, protocol: str) -> bool:
    """What the pool itself makes has an `__exit__` that calls nothing: nobody hears of it."""
    pools = {pair.owner for pair, _ in recogniser.acquiring.values() if pair.name == protocol}
    made = {cls for pool in pools if pool is not None for cls in _made_in(recogniser, pool)}
    entered = [cls for cls in made if "__exit__" in cls.methods]
    return bool(entered) and all(not cls.methods["__exit__"].calls for cls in entered)


def _made_in(recogniser: Recogniser, pool: Class) -> set[Class]:
    found = (
        recogniser.calls.model.type_of(method, call)
        for method in pool.methods.values()
        for call in method.calls
        if isinstance(call.func, ast.Name)
    )
    return {cls for cls in found if isinstance(cls, Class)}
