"""An allocation beside the pool (PA305) taken from it, where the class has the mixin."""

from auditor.adopt.draft import Refused
from auditor.adopt.inheritance import MIXIN
from auditor.adopt.pooling import pooled
from auditor.adopt.repairs.offer import draft_of, offered
from auditor.adopt.temporaries import Temporary, judged
from auditor.case import Case
from auditor.model import FixOffer
from auditor.project.adoption.class_table import ClassTable
from auditor.source.imports import origins


def through_mixin(case: Case) -> FixOffer | None:
    """A lease around the life of the tensor; None where the class has another pool, or it is no temporary."""
    file, span, owner = case.file, case.finding.span, case.finding.symbol
    if file is None or not _has_mixin(case):
        return None
    try:
        draft = draft_of(file)
        stands_for = origins(draft.as_source)
        for each in judged(draft, draft.class_named(owner), stands_for):
            if isinstance(each, Temporary) and draft.start(each.call) == (span.line, span.column - 1):
                after = pooled(draft, each)
                return offered([(file, after)], f"{each.made_by} taken from the pool for as long as it lives")
    except Refused:
        return None
    return None


def _has_mixin(case: Case) -> bool:
    """Whether the class has the mixin's `_lease_tensor`, by a base of that name."""
    table = ClassTable(sorted(case.facts.files, key=lambda each: each.path))
    for entry in table.classes():
        if (entry.span.path, entry.qualname) == (case.finding.span.path, case.finding.symbol):
            lineage = [entry, *table.ancestors(entry)]
            return any(base.rpartition(".")[2] == MIXIN for each in lineage for base in each.bases)
    return False
