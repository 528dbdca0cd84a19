"""What the flow analysis of a project found: all that others read of it, who need not import the analysis."""

from dataclasses import dataclass

from auditor.flow.lease import Lease
from auditor.flow.misuse import Misuse
from auditor.model import Failure, ProtocolUse
from auditor.project.adoption.pool_call import PoolCall


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
    pool_calls: tuple[PoolCall, ...] = ()
    misuses: tuple[Misuse, ...] = ()
