"""The words every other part speaks: spans, findings, finished runs. Standard library only."""

from auditor.model.finding import Finding, FixOffer, Safety, Severity, Step
from auditor.model.run import ClassRow, Conventions, Failure, ProtocolUse, Run, Summary, SwitchUse
from auditor.model.span import Span

__all__ = [
    "ClassRow",
    "Conventions",
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
    "SwitchUse",
]
