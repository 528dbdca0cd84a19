"""Open documents over the files that they will be saved to."""

import ast
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from auditor.source.discover import Discovered, SourceFile, shown
from auditor.source.load import Unreadable, encoding_of
from auditor.source.newer_syntax import in_older_syntax


def placed_over(
    found: Discovered, documents: Mapping[str, str], paths: Sequence[str]
) -> tuple[Discovered, dict[str, str]]:
    """The documents by the paths that reports show. A new file is audited before it is saved, an excluded
    one never."""
    by_location = {file.location: file.path for file in found.files}
    placed, new = {}, []
    for location, text in documents.items():
        path = by_location.get(location) or by_location.get(os.path.realpath(location))
        if path is None and not Path(location).exists() and _below(location, paths):
            path = shown(location)
            new.append(SourceFile(path, location))
        if path is not None:
            placed[path] = text
    files = tuple(sorted((*found.files, *new))) if new else found.files
    return replace(found, files=files), placed


def _below(location: str, paths: Sequence[str]) -> bool:
    return any(Path(path) in (Path(location), *Path(location).parents) for path in paths)


def is_saved(found: Discovered, path: str, data: bytes) -> bool:
    location = next(file.location for file in found.files if file.path == path)
    try:
        return Path(location).read_bytes() == data
    except OSError:
        return False


def as_bytes(text: str) -> bytes:
    """As the file would be saved: in the encoding that its first lines declare."""
    plain = text.encode("utf-8", "surrogatepass")
    try:
        return text.encode(encoding_of(plain))
    except (Unreadable, UnicodeError, LookupError):
        return plain  # reading it names what is wrong


def syntax_error(text: str) -> SyntaxError | None:
    try:
        ast.parse(text)
    except SyntaxError as error:
        return error if in_older_syntax(text) is None else None
    except (ValueError, RecursionError, MemoryError):
        return None  # the audit says it
    return None
