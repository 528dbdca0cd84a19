"""What leak tests said of findings, kept beside the settings so that the next audit can repeat it.

The file belongs to the tree as a baseline does: commit it or ignore it. A proof holds as long as the file of
its finding is the same, byte by byte; after that the finding is `not_run` until the gate has run again.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from auditor.atomic import write_atomically
from auditor.model import Finding

FILE = ".poolaudit_proofs.json"
CONFIRMED, NOT_REPRODUCED, NOT_RUN = "confirmed", "not_reproduced", "not_run"
_SPOKEN_OF = "PA1"
_VERSION = 1


class Proof(msgspec.Struct, frozen=True):
    """One finding's proof, and the digest of the file that it is about."""

    proof: str
    digest: str


class Proofs(msgspec.Struct, frozen=True):
    """The whole file."""

    version: int
    device: str
    findings: Mapping[str, Proof]


def read_proofs(file: Path) -> Proofs | None:
    """None where there are none, or where the file says nothing that we understand."""
    try:
        proofs = msgspec.json.decode(file.read_bytes(), type=Proofs)
    except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return proofs if proofs.version == _VERSION else None


def with_proofs(findings: Sequence[Finding], file: Path) -> Sequence[Finding]:
    """The findings, each with what a test said of it; all None where no test ever ran."""
    proofs = read_proofs(file)
    if proofs is None:
        return findings
    digests: dict[str, str] = {}
    return [replace(finding, proof=_proof(finding, proofs, digests)) for finding in findings]


def _proof(finding: Finding, proofs: Proofs, digests: dict[str, str]) -> str | None:
    if not can_be_proven(finding):
        return None
    path = finding.span.path
    known = proofs.findings.get(finding.fingerprint)
    if known is None:
        return NOT_RUN
    if path not in digests:
        digests[path] = digest(Path(path))
    return known.proof if known.digest == digests[path] else NOT_RUN


def can_be_proven(finding: Finding) -> bool:
    """Whether a test could speak of it: leaks show at run time, style does not."""
    return finding.code.startswith(_SPOKEN_OF)


def write_proofs(file: Path, device: str, found: Mapping[str, str], findings: Iterable[Finding]) -> None:
    """Keep the proofs of `findings`, by fingerprint."""
    kept = {
        finding.fingerprint: Proof(found.get(finding.fingerprint, NOT_RUN), digest(Path(finding.span.path)))
        for finding in sorted(findings, key=lambda finding: finding.fingerprint)
        if can_be_proven(finding)
    }
    encoded = msgspec.json.format(msgspec.json.encode(Proofs(_VERSION, device, kept)), indent=1)
    write_atomically(file, encoded + b"\n")


def digest(file: Path) -> str:
    """Of a file's bytes; empty for what cannot be read, which then equals nothing that was."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    except OSError:
        return ""
