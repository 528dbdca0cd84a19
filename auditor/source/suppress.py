"""Inline comments that silence findings: `# poolaudit: ignore[PA101]`."""

from dataclasses import dataclass

from auditor.model import Span


@dataclass(frozen=True, slots=True)
class Suppression:
    """One comment. `codes` is empty for a bare `ignore`; `line` is the line whose findings it silences.

    `used` lists the codes that really silenced a finding.
    """

    span: Span
    line: int
    codes: tuple[str, ...]
    used: tuple[str, ...] = ()
