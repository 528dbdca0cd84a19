"""The texts of the files of one audit, read when they are asked for."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

from auditor.source.discover import STDIN, SourceFile
from auditor.source.load import Unreadable, decode, digest, lines_of, read


class Texts:
    """Every file by the path that reports show. Standard input can be read only once, so it is kept."""

    def __init__(self, files: Iterable[SourceFile]) -> None:
        self._files = {file.path: file for file in files}
        self._lines: dict[str, list[str]] = {}
        self._held = {STDIN: sys.stdin.buffer.read()} if STDIN in self._files else {}

    def __iter__(self) -> Iterator[SourceFile]:
        return iter(self._files.values())

    def held(self, file: SourceFile) -> bytes | None:
        """The bytes of standard input and of what `changed` put there; else None: whoever needs it reads."""
        return self._held.get(file.path)

    def changed(self, data: Mapping[str, bytes]) -> "Texts":
        """The same files, some of them with other contents."""
        texts = Texts(())
        texts._files = self._files
        texts._held = self._held | dict(data)
        return texts

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

    def readable(self, paths: Iterable[str]) -> "Readable":
        return Readable(self, paths)

    def lines(self, path: str) -> Sequence[str]:
        """The lines of a file, none if it has become unreadable."""
        if path not in self._lines:
            try:
                self._lines[path] = lines_of(self.text(path))
            except (Unreadable, KeyError):
                self._lines[path] = []
        return self._lines[path]


class Readable(Mapping[str, str]):
    """The texts of some files as a mapping; a file that can no longer be read is empty (its failure is
    reported)."""

    def __init__(self, texts: Texts, paths: Iterable[str]) -> None:
        self._texts = texts
        self._paths = dict.fromkeys(sorted(paths))
        self._read: dict[str, str] = {}

    def __getitem__(self, path: str) -> str:
        if path not in self._paths:
            raise KeyError(path)
        if path not in self._read:
            try:
                self._read[path] = self._texts.text(path)
            except Unreadable:
                self._read[path] = ""
        return self._read[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)
