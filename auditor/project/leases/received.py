"""Who gets the leases that a function returns."""

from collections.abc import Sequence

from auditor.flow.lease import Callers
from auditor.model import Step
from auditor.project.outcome import Outcome, loses_normally
from auditor.protocols.vocabulary import ACQUIRE_WORDS, WEAK, take_apart

SAYING_SO = ACQUIRE_WORDS - WEAK
"""Verbs by which a function's name tells its callers that its result is a lease."""


def callers_of(outcome: Outcome, received: Sequence[Outcome]) -> Callers | None:
    """Who gets the lease that a public function returns."""
    function = outcome.function
    if (
        outcome.acquisition.opened
        or outcome.returned is None
        or function.name.startswith("_")
        or function.parent is not None
        or take_apart(function.name, SAYING_SO) is not None
    ):
        return None
    if any(place[0] in function.parameters[:1] for place in outcome.beside):
        return None  # a table of the object has it as well, and the object answers for that
    received = [o for o in received if o.acquisition.places[0][1:] == outcome.returned] or list(received)
    losing = [
        Step(
            o.lease.span.path,
            o.lease.span.line,
            o.lease.span.column,
            f"`{o.function.qualname}` gets it and loses it",
        )
        for o in received
        if o.lease.leaks and not (o.lease.released or o.lease.handed_over) and loses_normally(o.lease)
    ]
    return Callers(len(received), tuple(losing))
