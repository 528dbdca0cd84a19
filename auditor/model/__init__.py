"""The words every other part speaks: spans, findings, finished runs. Standard library only."""

from auditor.model.edit import Edit
from auditor.model.finding import Finding, FixOffer, Safety, Severity, Step
from auditor.model.run import (
    WHOLE_TREE,
    ClassRow,
    Conventions,
    Failure,
    Point,
    ProtocolUse,
    RuleInfo,
    Run,
    Summary,
    SwitchUse,
    confession,
)
from auditor.model.span import Span

__all__ = [
    "WHOLE_TREE",
    "ClassRow",
    "Conventions",
    "Edit",
    "Failure",
    "Finding",
    "FixOffer",
    "Point",
    "ProtocolUse",
    "RuleInfo",
    "Run",
    "Safety",
    "Severity",
    "Span",
    "Step",
    "Summary",
    "SwitchUse",
    "confession",
]
