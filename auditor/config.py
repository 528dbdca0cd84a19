"""The settings that the analysis reads, typed."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProtocolSettings:
    """One `[[tool.poolaudit.protocols]]` table (contract: Settings)."""

    name: str
    acquire: tuple[str, ...] = ()
    release: tuple[str, ...] = ()
    lease: tuple[str, ...] = ()
    transfer: tuple[str, ...] = ()
    handle: str = "result"
    value: str = "object"


@dataclass(frozen=True, slots=True)
class AnalysisSettings:
    """What decides the flow analysis' answer; part of every cache key."""

    exceptions: str = "calls"
    protocols: tuple[ProtocolSettings, ...] = ()
    enable_protocols: tuple[str, ...] = ()
    disable_protocols: tuple[str, ...] = ()
