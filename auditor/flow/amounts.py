"""A lease that is an amount, or goes by a name: whatever is equal to it stands for it."""

import ast
from dataclasses import replace

from auditor.flow.effects import Value
from auditor.flow.held import NOWHERE, Held, Places
from auditor.flow.holding import Holding
from auditor.flow.measured_anew import measured_anew
from auditor.flow.places import spelled_out
from auditor.ir.ops import Call, Constant, Fresh, InPlace


class Amounts(Holding):
    """Numbers and texts that were written out again."""

    def _same_amount(self, op: Constant | Fresh | Call, held: Held) -> tuple[Places, Places]:
        """`credits.give(4)` gives back what `credits.take(4)` took, `give(len(x))` what `take(len(x))`; so
        does `close("gather")` of `open("gather")`."""
        named = isinstance(op, Constant) and isinstance(op.value, str)
        same = (named or self.acquisition.value is Value.AMOUNT) and spelled_out(op) in held.places
        if same and isinstance(op.at, ast.expr) and measured_anew(self.graph, self.site, op.at):
            return NOWHERE, NOWHERE
        return (frozenset({op.target}) if same else NOWHERE), NOWHERE

    def _summed(self, op: InPlace, held: Held) -> Held | None:
        """`total += n`: the sum is of an amount that is owed, and is given back or noted in its place."""
        amount = self.acquisition.value is Value.AMOUNT and op.operand in held.places
        if not amount or len(op.target) != 1 or self._outlives(op.target):
            return None
        return replace(held, places=held.places | {op.target}, kept=True)
