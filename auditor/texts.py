"""The texts of the files of one audit, read when they are asked for."""

import sys
from collections.abc import Iterable, Iterator, Sequence

from auditor.source.discover import STDIN, SourceFile
from auditor.source.load import Unreadable, decode, digest, lines_of, read


class Texts:
    """Every file by the path that reports show. Standard input can be read only once, so it is kept."""

    def __init__(self, files: Iterable[SourceFile]) -> None:
        self._files = {file.path: file for file in files}
        self._lines: dict[str, list[str]] = {}
        self._stdin = sys.stdin.buffer.read() if STDIN in self._files else b""

    def __iter__(self) -> Iterator[SourceFile]:
        return iter(self._files.values())

    def held(self, file: SourceFile) -> bytes | None:
        """The bytes of standard input; None for a file, which whoever needs it reads."""
        return self._stdin if file.location == STDIN else None

    def data(self, file: SourceFile) -> bytes:
        held = self.held(file)
        return read(file) if held is None else held

    def digests(self) -> dict[str, str]:
        """The digest of every file's bytes; of one that cannot be read, why."""
        found = {}
        for file in self:
            try:
                found[file.path] = digest(self.data(file))
            except Unreadable as error:
                found[file.path] = str(error)
        return found

    def text(self, path: str) -> str:
        return decode(self.data(self._files[path]))

    def lines(self, path: str) -> Sequence[str]:
        """The lines of a file, none if it has become unreadable."""
        if path not in self._lines:
            try:
                self._lines[path] = lines_of(self.text(path))
            except (Unreadable, KeyError):
                self._lines[path] = []
        return self._lines[path]
