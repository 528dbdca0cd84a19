"""Callbacks that an object was told at its birth, and tells what it holds when it is through:

    def __init__(self, pool, on_end):
        self.channel = pool.get()
        self.on_end = on_end

    def run(self):
        ...
        self.on_end(self.channel)

Whoever made the object sees to the channel there."""

import re
from collections.abc import Sequence

from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.modules import Function

WHEN_OVER = re.compile(
    r"_*(?:on|when|after|at)_(?:\w+_)?(?:end(?:ed)?|done|clos(?:e|ed|ing)|finish(?:ed)?|exit|over|stop(?:ped)?"
    r"|drop(?:ped)?|complet(?:e|ed|ion)|releas(?:e|ed)|return(?:ed)?)$|_*(?:done|ended|finished|give_?back|put_?back)$"
)
"""Names of what is called when something is over."""


def told_when_over(method: Function, family: Sequence[Function], attribute: str) -> bool:
    own = method.owner or ""
    return any(
        (name := own_attribute(call.func, own)) is not None
        and WHEN_OVER.match(name) is not None
        and any(own_attribute(given, own) == attribute for given in call.args)
        and any(_is_told(each, name) for each in family)
        for call in method.calls
    )


def _is_told(init: Function, field: str) -> bool:
    """`self.on_end = on_end` of a parameter."""
    return init.name == "__init__" and any(
        own_attribute(target, init.owner or "") == field and getattr(value, "id", None) in init.parameters[1:]
        for target, value in assignments(init)
    )
