"""Where settings come from: the nearest file that has some, the command line over it, clear errors."""

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from auditor.config import ProtocolSettings, Settings, StandardNames

DEFAULT = "default"
COMMAND_LINE = "command line"


class SettingsError(Exception):
    """Bad configuration; the message names the file, the key and the way out."""


@dataclass(frozen=True, slots=True)
class Effective:
    """The settings in force: where each key came from, and the `root` that globs are relative to."""

    settings: Settings
    root: Path
    file: Path | None
    origins: Mapping[str, str]

    @property
    def recipes(self) -> Path | None:
        """The file of recipes that the settings name."""
        return self.root / self.settings.recipes if self.settings.recipes else None


def effective(
    start: Path,
    *,
    config: Path | None = None,
    isolated: bool = False,
    overrides: Mapping[str, Any] | None = None,
) -> Effective:
    """The settings for `start`: `config` or the nearest file (none if `isolated`), `overrides` on top."""
    file = None if isolated else config or nearest_file(start)
    table = _table(file) if file else {}
    settings = _convert(table, file) if file else Settings()
    origins = {key: str(file) if key in table else DEFAULT for key in _keys(Settings)}
    for key, value in (overrides or {}).items():
        settings = msgspec.structs.replace(settings, **{key.replace("-", "_"): value})
        origins[key] = COMMAND_LINE
    root = file.parent if file and file != config else Path.cwd()
    return Effective(settings, root, file, origins)


def nearest_file(start: Path) -> Path | None:
    """The first poolaudit.toml, or pyproject.toml with a [tool.poolaudit] table, from `start` upwards."""
    start = start.absolute()
    for folder in (start, *start.parents) if start.is_dir() else start.parents:
        if (own := folder / "poolaudit.toml").is_file():
            return own
        shared = folder / "pyproject.toml"
        if shared.is_file() and b"poolaudit" in _read(shared) and _has_table(shared):
            return shared
    return None


def _has_table(file: Path) -> bool:
    tool = _toml(file).get("tool")
    return isinstance(tool, dict) and "poolaudit" in tool


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise SettingsError(f"{file}: cannot be read: {error.strerror}") from error


def _toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_read(file).decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise SettingsError(f"{file}: TOML must be UTF-8: {error.reason} at byte {error.start}") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{file}: not valid TOML: {error}") from error
    except RecursionError as error:
        raise SettingsError(f"{file}: nested too deeply to be read as TOML") from error


def _table(file: Path) -> dict[str, Any]:
    """The poolaudit table of a settings file: under `tool.poolaudit` in a pyproject.toml, else at the top."""
    whole = _toml(file)
    if file.name != "pyproject.toml":
        if "tool" in whole:
            raise SettingsError(
                f"{file}: a [tool] table belongs in a pyproject.toml; here the keys stand at the top"
            )
        return whole
    table = whole.get("tool", {})
    table = table.get("poolaudit", {}) if isinstance(table, dict) else {}
    if not isinstance(table, dict):
        raise SettingsError(f"{file}: tool.poolaudit must be a table, not {type(table).__name__}")
    return table


def _convert(table: dict[str, Any], file: Path) -> Settings:
    for problem in _unknown_keys(table):
        raise SettingsError(f"{file}: {problem}")
    try:
        settings = msgspec.convert(table, Settings, strict=True)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{file}: {_in_words(error)}") from error
    problems = [*_bad_protocols(settings.protocols)] if settings.protocols else []
    if settings.enable_protocols or settings.disable_protocols:
        problems += _bad_protocol_names(settings)
    for problem in problems:
        raise SettingsError(f"{file}: {problem}")
    return settings


def _in_words(error: msgspec.ValidationError) -> str:
    """msgspec's message with the key in front: `select: expected array, got str`."""
    what, _, where = str(error).replace(" | null", "").partition(" - at ")  # TOML has no null
    key = where.strip("`").removeprefix("$.") or "tool.poolaudit"
    return f"{key}: {what[0].lower()}{what[1:]}"


def _keys(kind: type) -> tuple[str, ...]:
    return tuple(field.encode_name for field in msgspec.structs.fields(kind))


def _unknown_keys(table: dict[str, Any]) -> Iterator[str]:
    yield from _unknown_in(table, _keys(Settings), "")
    if isinstance(standard := table.get("standard"), dict):
        yield from _unknown_in(standard, _keys(StandardNames), "standard.")
    protocols = table.get("protocols")
    for number, protocol in enumerate(protocols if isinstance(protocols, list) else ()):
        if isinstance(protocol, dict):
            yield from _unknown_in(protocol, tuple(ProtocolSettings.__slots__), f"protocols[{number}].")


def _unknown_in(table: dict[str, Any], known: tuple[str, ...], prefix: str) -> Iterator[str]:
    for key in table:
        if key not in known:
            yield f"unknown key `{prefix}{key}`{suggestion(key, known)}"


def suggestion(word: str, known: tuple[str, ...]) -> str:
    """`; did you mean ...?` with the nearest known word, else the list of them."""
    near = difflib.get_close_matches(word.replace("_", "-"), known, n=1, cutoff=0.5)
    return f"; did you mean `{near[0]}`?" if near else f"; known: {', '.join(known)}"


def _bad_protocols(protocols: tuple[ProtocolSettings, ...]) -> Iterator[str]:
    from auditor.protocols.protocol import protocol_from_settings  # not needed by a remembered run

    names = [protocol.name for protocol in protocols]
    for number, protocol in enumerate(protocols):
        where = f"protocols[{number}] `{protocol.name}`"
        if names.index(protocol.name) != number:
            yield f"{where}: the name is already taken by protocols[{names.index(protocol.name)}]"
        if not protocol.acquire and not protocol.lease:
            yield f"{where}: needs `acquire` or `lease` patterns, or it can match nothing"
        if protocol.acquire and not protocol.release:
            yield f"{where}: has `acquire` without `release`, so every use would be a leak"
        try:
            protocol_from_settings(protocol)
        except ValueError as error:
            yield f"{where}: {error}"


def _bad_protocol_names(settings: Settings) -> Iterator[str]:
    from auditor.protocols.load import built_in_names

    known = built_in_names()
    switches = {
        "enable-protocols": settings.enable_protocols,
        "disable-protocols": settings.disable_protocols,
    }
    for key, names in switches.items():
        for name in names:
            if name not in known:
                yield f"{key}: no built-in protocol is called `{name}`{suggestion(name, known)}"
