"""Writes generated files so that what a person changed is never lost: each has the digest of its text."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from auditor.atomic import write_atomically

_MARK = "# poolaudit leaktests, sha256 "
_EXPLAINED = ": written again as long as that is the digest of the rest"


@dataclass(slots=True)
class Written:
    """What became of each file."""

    fresh: list[Path] = field(default_factory=list)
    unchanged: list[Path] = field(default_factory=list)
    kept: list[Path] = field(default_factory=list)  # changed by a person, or not ours

    @property
    def files(self) -> list[Path]:
        """Those that say what was meant: what a person changed counts as the person's answer."""
        return [*self.fresh, *self.unchanged, *self.kept]


def write_generated(file: Path, text: str, written: Written) -> None:
    """Write `text` under its mark, unless the file holds what we did not write."""
    wanted = marked(text)
    if file.exists():
        present = file.read_text("utf-8", errors="replace")
        if present == wanted:
            written.unchanged.append(file)
            return
        if not untouched(present):
            written.kept.append(file)
            return
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, wanted.encode())
    written.fresh.append(file)


def marked(text: str) -> str:
    """The text with its digest in the first line."""
    return f"{_MARK}{_digest(text)}{_EXPLAINED}\n{text}"


def untouched(present: str) -> bool:
    """Whether a file is as we wrote it."""
    first, _, rest = present.partition("\n")
    return first.startswith(_MARK) and first.removeprefix(_MARK).partition(":")[0] == _digest(rest)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
