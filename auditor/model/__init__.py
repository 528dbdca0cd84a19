"""The words every other part speaks: spans, findings, finished runs. Standard library only."""

from auditor.model.finding import Finding, FixOffer, Safety, Severity, Step
from auditor.model.run import ClassRow, Failure, ProtocolUse, Run, Summary
from auditor.model.span import Span

__all__ = [
    "ClassRow",
    "Failure",
    "Finding",
    "FixOffer",
    "ProtocolUse",
    "Run",
    "Safety",
    "Severity",
    "Span",
    "Step",
    "Summary",
]
