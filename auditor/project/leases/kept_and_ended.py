"""What a function keeps in a field of some object, where its class gives back what is in a field so named."""

from auditor.project.fields.elsewhere import released_attributes
from auditor.project.meaning.recognise import Recogniser
from auditor.project.meaning.sites import last_name
from auditor.project.outcome import Outcome


def is_ended_where_kept(recogniser: Recogniser, outcome: Outcome) -> bool:
    """`seq.keys = keys`, and `for key in seq.keys: self.cache.decref(key)` in another method."""
    fields = {piece[1:] for _, path in outcome.stored for piece in path[1:] if piece.startswith(".")}
    cls = outcome.function.cls
    if not fields or cls is None:
        return False
    names = recogniser.ending_names(outcome.acquisition.protocol)
    for method in cls.methods.values():
        known = {call for call in method.calls if last_name(call) in names}
        if known and not fields.isdisjoint(released_attributes(method, of_others=False, known=known)):
            return True
    return False
