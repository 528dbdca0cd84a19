"""What a rule says: where, why, along which path, and whether it can be repaired."""

from dataclasses import dataclass
from enum import StrEnum

from auditor.model.edit import Edit
from auditor.model.span import Span


class Severity(StrEnum):
    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


class Safety(StrEnum):
    """Whether applying a fix keeps the program's meaning provably (`safe`) or changes who owns (`unsafe`)."""

    SAFE = "safe"
    UNSAFE = "unsafe"


@dataclass(frozen=True, slots=True)
class Step:
    """One station on the way from the acquire to the leak."""

    path: str
    line: int
    column: int
    note: str


@dataclass(frozen=True, slots=True)
class FixOffer:
    """What could be done. `edits` do it; where there are none the description is advice."""

    safety: Safety
    description: str
    edits: tuple[Edit, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault at one place. `fingerprint` survives moved lines; `proof` is set by the leak tests; `unfixed`
    says why there is no fix."""

    code: str
    name: str
    severity: Severity
    span: Span
    symbol: str
    message: str
    trace: tuple[Step, ...] = ()
    fix: FixOffer | None = None
    fingerprint: str = ""
    proof: str | None = None
    unfixed: str = ""
