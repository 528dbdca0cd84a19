"""How many places `adopt` would edit in a class: the codemod itself is asked, so that both say the same."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from auditor.adopt.adoption import Adopter, Fate
from auditor.adopt.project import Project
from auditor.adopt.vendor import standard
from auditor.fixes.document import Document
from auditor.model import ClassRow
from auditor.project.adoption.class_table import ClassTable
from auditor.source.entries import ClassIndex, FileIndex
from auditor.texts import Texts


class Documents(Mapping[str, Document]):
    """The files of an audit, read when one is asked for; only those that were are listed."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self._files = {file.path: file for file in texts}
        self._read: dict[str, Document] = {}

    def __getitem__(self, path: str) -> Document:
        if path not in self._read:
            self._read[path] = Document(path, self._texts.data(self._files[path]))
        return self._read[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)


def with_effort(rows: Iterable[ClassRow], indexes: Iterable[FileIndex], texts: Texts) -> tuple[ClassRow, ...]:
    """The rows, those of classes without a pool with the number of edits that adopting them takes."""
    files = sorted(indexes, key=lambda file: file.path)
    table, documents = ClassTable(files), Documents(texts)
    classes = {(each.span.path, each.span.line, each.qualname): each for each in table.classes()}
    return tuple(
        replace(row, edits=_edits(classes[row.path, row.line, row.name], Project(table, documents)))
        if row.support == "none" and row.edits is not None
        else row
        for row in rows
    )


def _edits(entry: ClassIndex, project: Project) -> int | None:
    """None where nothing may be pooled, or the class cannot take the mixin."""
    outcome = Adopter(project, standard).adopt(entry)
    return len(outcome.edits) if outcome.fate is Fate.ADOPTED else None
