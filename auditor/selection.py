"""Which rules run where: code prefixes, ALL, per-file ignores."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from auditor.config import Settings
from auditor.model import Finding
from auditor.rule import all_rules
from auditor.settings_file import SettingsError, suggestion

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

ALL = "ALL"


class Selection:
    """The rules in force; `keeps` answers for one finding, per-file ignores included."""

    def __init__(self, settings: Settings, root: Path) -> None:
        metas = [rule.meta for rule in all_rules()]
        known = tuple(meta.code for meta in metas)
        for codes in (settings.select or (), settings.ignore, *settings.per_file_ignores.values()):
            check_codes(codes, known)
        self.codes = frozenset(
            meta.code
            for meta in metas
            if _wins(meta.code, settings.select, settings.ignore, default=meta.default)
        )
        self._per_file = PerFileIgnores(settings.per_file_ignores, root)

    def keeps(self, finding: Finding) -> bool:
        return finding.code in self.codes and not self._per_file.ignore(finding)


def _wins(code: str, select: tuple[str, ...] | None, ignore: tuple[str, ...], *, default: bool) -> bool:
    """The longer prefix wins; on a tie, `ignore` does (as in Ruff)."""
    selected = (0 if default else -1) if select is None else _longest(code, select)
    return selected > _longest(code, ignore)


def _longest(code: str, prefixes: Iterable[str]) -> int:
    """Length of the longest prefix that matches `code`: 0 for ALL, -1 where none does."""
    matching = [0 if prefix == ALL else len(prefix) for prefix in prefixes if matches(code, prefix)]
    return max(matching, default=-1)


def matches(code: str, prefix: str) -> bool:
    return prefix == ALL or code.startswith(prefix)


def check_codes(codes: Iterable[str], known: tuple[str, ...]) -> None:
    """Raise SettingsError for the first code that names no rule."""
    for code in codes:
        if code == ALL or (len(code) > 1 and any(rule.startswith(code) for rule in known)):
            continue
        family = tuple(
            rule for rule in known if rule.startswith(code.upper()[:3])
        )  # PA003 is a PA0, not a PA103
        raise SettingsError(f"unknown rule code `{code}`{suggestion(code.upper(), family or (*known, ALL))}")


class PerFileIgnores:
    """Globs in the manner of .gitignore, relative to the settings file, and the codes that each silences."""

    def __init__(self, table: Mapping[str, tuple[str, ...]], root: Path) -> None:
        self._root = root
        self._globs = [(_compiled(glob), codes) for glob, codes in table.items()]
        self._verdicts: dict[str, tuple[str, ...]] = {}

    def ignore(self, finding: Finding) -> bool:
        """Whether a glob that matches the finding's file silences its rule."""
        path = finding.span.path
        if path not in self._verdicts:
            self._verdicts[path] = self._codes(path)
        return any(matches(finding.code, prefix) for prefix in self._verdicts[path])

    def _codes(self, path: str) -> tuple[str, ...]:
        inside = os.path.relpath(path, self._root).replace(os.sep, "/")
        if not self._globs or inside.startswith("../"):  # outside of the project its settings do not speak
            return ()
        return tuple(code for spec, codes in self._globs if spec.match_file(inside) for code in codes)


def _compiled(glob: str) -> "GitIgnoreSpec":
    from pathspec import GitIgnoreSpec  # only where a project has such settings

    try:
        return GitIgnoreSpec.from_lines([glob])
    except ValueError as error:
        raise SettingsError(f"per-file-ignores: `{glob}` is no glob: {error}") from error
