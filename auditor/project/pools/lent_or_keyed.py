"""Pools that keep what they lend under the caller's key, and hand out an object that gives it back."""

import ast

from auditor.flow.effects import Handle
from auditor.project.code.calls import Calls
from auditor.project.code.modules import Function, Module
from auditor.project.pools.halves import Half, Pair
from auditor.project.pools.lent_objects import endings_of, lent_class


class LentOrKeyed:
    """`lease = manager.acquire(name)`: whoever tells the pool no name has the lease to end."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self._keyed: dict[tuple[str, str], bool] = {}

    def endings(self, pair: Pair, half: Half) -> tuple[Function, ...]:
        """Methods that end the object which a keyed acquire returns."""
        if half.handle is not Handle.ARGUMENT or pair.owner is None:
            return ()
        lent = lent_class(self.calls.model, pair.owner, half.function)
        return tuple(endings_of(lent)) if lent is not None and lent is not pair.owner else ()

    def gives_back_keys(self, module: Module, pair: Pair) -> bool:
        """Whether anything in a module tells the pool a key: `manager.release(name)`."""
        key = (module.path, pair.name)
        if key not in self._keyed:
            names = {half.function.name for half in pair.releases}
            calls = (call for each in module.by_node.values() for call in each.calls if call.args)
            self._keyed[key] = any(
                isinstance(call.func, ast.Attribute) and call.func.attr in names for call in calls
            )
        return self._keyed[key]
