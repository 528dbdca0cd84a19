"""The protocols in force: settings first, then what the tree defines, then the built-in data files."""

import tomllib
from collections.abc import Sequence
from functools import cache
from importlib import resources

from auditor.config import AnalysisSettings, ProtocolSettings
from auditor.protocols.protocol import Protocol, protocol_from_settings


@cache
def built_in() -> tuple[tuple[Protocol, bool], ...]:
    """Every protocol shipped with the tool, and whether it is on unless disabled."""
    found = []
    folder = resources.files("auditor.protocols")
    for entry in sorted(folder.iterdir(), key=lambda item: item.name):
        if entry.name.endswith(".toml"):
            for table in tomllib.loads(entry.read_text(encoding="utf-8")).get("protocols", ()):
                found.append((_from_table(table), bool(table.get("default", True))))
    return tuple(found)


def _from_table(table: dict[str, object]) -> Protocol:
    def strings(key: str) -> tuple[str, ...]:
        values = table.get(key, [])
        assert isinstance(values, list)
        return tuple(str(value) for value in values)

    settings = ProtocolSettings(
        name=str(table["name"]),
        acquire=strings("acquire"),
        release=strings("release"),
        lease=strings("lease"),
        transfer=strings("transfer"),
        handle=str(table.get("handle", "result")),
        value=str(table.get("value", "object")),
    )
    return protocol_from_settings(settings, "built-in")


def built_in_names() -> tuple[str, ...]:
    return tuple(protocol.name for protocol, _ in built_in())


def in_force(settings: AnalysisSettings, discovered: Sequence[Protocol] = ()) -> tuple[Protocol, ...]:
    """In order of precedence: the first protocol that matches a call decides."""
    declared = tuple(protocol_from_settings(table) for table in settings.protocols)
    shipped = tuple(
        protocol
        for protocol, default in built_in()
        if (default or protocol.name in settings.enable_protocols)
        and protocol.name not in settings.disable_protocols
    )
    return (*declared, *discovered, *shipped)
