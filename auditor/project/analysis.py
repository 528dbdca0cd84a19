"""The flow analysis of a whole project: sources in, decided leases out."""

from collections.abc import Mapping
from dataclasses import dataclass

from auditor.config import AnalysisSettings
from auditor.flow.lease import Lease
from auditor.model import Failure, ProtocolUse


@dataclass(frozen=True, slots=True)
class FlowResult:
    leases: tuple[Lease, ...] = ()
    protocols: tuple[ProtocolUse, ...] = ()
    acquires: int = 0
    followed: int = 0
    acquire_names: tuple[str, ...] = ()
    release_names: tuple[str, ...] = ()
    failures: tuple[Failure, ...] = ()
    unfollowed: tuple[Failure, ...] = ()


def analyse(sources: Mapping[str, str], settings: AnalysisSettings) -> FlowResult:
    """Decide the life of every acquire in `sources` (path relative to the working directory -> text)."""
    return FlowResult()
