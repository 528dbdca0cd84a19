"""The settings, typed: what a project may configure and what each value is when nobody did."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

Exceptions = Literal["none", "explicit", "calls"]


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


class StandardNames(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """The names a project standardises on; `None` where it did not say."""

    acquire: str | None = None
    release: str | None = None
    switch: str | None = None
    default: bool | None = None
    threshold_mb: float | None = None


@dataclass(frozen=True, slots=True)
class AnalysisSettings:
    """What decides what is found; part of every cache key."""

    exceptions: str = "calls"
    protocols: tuple[ProtocolSettings, ...] = ()
    enable_protocols: tuple[str, ...] = ()
    disable_protocols: tuple[str, ...] = ()
    standard: StandardNames = field(default_factory=StandardNames)


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """Every setting; `select=None` means the rules that are on by default."""

    select: tuple[str, ...] | None = None
    ignore: tuple[str, ...] = ()
    per_file_ignores: Mapping[str, tuple[str, ...]] = {}  # msgspec copies a mutable default
    exclude: tuple[str, ...] = ()
    exceptions: Exceptions = "calls"
    baseline: str | None = None
    recipes: str | None = None
    standard: StandardNames = StandardNames()
    enable_protocols: tuple[str, ...] = ()
    disable_protocols: tuple[str, ...] = ()
    protocols: tuple[ProtocolSettings, ...] = ()

    @property
    def analysis(self) -> AnalysisSettings:
        """The part that the flow analysis reads."""
        return AnalysisSettings(
            exceptions=self.exceptions,
            protocols=self.protocols,
            enable_protocols=self.enable_protocols,
            disable_protocols=self.disable_protocols,
            standard=self.standard,
        )
