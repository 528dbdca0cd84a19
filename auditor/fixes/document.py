"""One source file as a fix sees it: text by line and column, and the bytes that no edit may touch."""

import codecs
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from auditor.model import Edit, Span
from auditor.source.load import Unreadable, decode, digest, encoding_of

_LINE_END = re.compile(r"\r\n|\r|\n")


class BadEdit(ValueError):
    """An edit that does not fit its file: the message says why."""


@dataclass(frozen=True)
class Document:
    """A file's bytes at one moment. Everything else follows from them."""

    path: str
    data: bytes

    @cached_property
    def text(self) -> str:
        """The text, newlines as they are. Raises `Unreadable`."""
        return decode(self.data)

    @cached_property
    def digest(self) -> str:
        return digest(self.data)

    @cached_property
    def newline(self) -> str:
        """The line end that most lines have; the first met, where two are as frequent."""
        ends = _LINE_END.findall(self.text)
        return max(dict.fromkeys(ends), key=ends.count) if ends else "\n"

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all lines end alike."""
        return len(set(_LINE_END.findall(self.text))) <= 1

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *(match.end() for match in _LINE_END.finditer(self.text))]

    def offsets(self, span: Span) -> tuple[int, int]:
        """Where `span` begins and ends in `text`. Raises BadEdit outside of it."""
        start, end = self._offset(span.line, span.column), self._offset(span.end_line, span.end_column)
        if start > end:
            raise BadEdit(f"{self.path}: line {span.line} ends before it begins")
        return start, end

    def _offset(self, line: int, column: int) -> int:
        if not 1 <= line <= len(self._starts) or column < 1:
            raise BadEdit(f"{self.path} has no line {line}, column {column}")
        start = self._starts[line - 1]
        limit = self._starts[line] if line < len(self._starts) else len(self.text)
        if start + column - 1 > limit:
            raise BadEdit(f"{self.path}: line {line} has no column {column}")
        return start + column - 1

    def edited(self, edits: Iterable[Edit]) -> "Document":
        """This file with `edits`, which do not overlap. Raises BadEdit, Unreadable."""
        placed = sorted((*self.offsets(edit.span), edit.replacement) for edit in edits)
        parts, at = [], 0
        for start, end, replacement in placed:
            parts += [self.text[at:start], self._as_here(replacement)]
            at = end
        return self._with_text("".join([*parts, self.text[at:]]))

    def _as_here(self, replacement: str) -> str:
        """Where every line of the file ends alike, those of the replacement do too."""
        return _LINE_END.sub(self.newline, replacement) if self.is_uniform else replacement

    def _with_text(self, text: str) -> "Document":
        codec = encoding_of(self.data)
        mark = codecs.BOM_UTF8 if self.data.startswith(codecs.BOM_UTF8) else b""
        codec = "utf-8" if mark else codec
        try:
            if mark + self.text.encode(codec) != self.data:
                raise BadEdit(f"{self.path}: {codec} does not give its bytes back unchanged")
            edited = Document(self.path, mark + text.encode(codec))
        except UnicodeEncodeError as error:
            raise BadEdit(f"{self.path}: {codec} cannot write {text[error.start]!r}") from error
        try:
            changed = edited.text != text
        except Unreadable as error:
            raise BadEdit(f"{self.path}: {error}") from error
        if changed:
            raise BadEdit(f"{self.path}: its encoding would be read differently after the edit")
        return edited
