"""The files that a run may rewrite: as they were, as they are by now, and the classes in them."""

import ast
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from auditor.adopt.draft import Draft
from auditor.adopt.inheritance import MIXIN
from auditor.fixes.document import Document
from auditor.model import Failure
from auditor.project.adoption.class_table import ClassTable
from auditor.source.discover import SourceFile
from auditor.source.entries import ClassIndex, FileIndex
from auditor.source.imports import dotted_text, origins
from auditor.source.index import index_file
from auditor.source.load import Unreadable, read
from auditor.source.newer_syntax import in_older_syntax

Key = tuple[str, str]
"""A class by the path of its file and its qualified name."""


class Project:
    """`drafts` holds the files that were rewritten; all others are what `documents` says."""

    def __init__(self, table: ClassTable, documents: Mapping[str, Document]) -> None:
        self.table = table
        self.documents = documents
        self.drafts: dict[str, Draft] = {}

    def draft(self, path: str) -> Draft:
        """The file as it is by now."""
        if path not in self.drafts:
            self.drafts[path] = Draft.of(path, self.documents[path].text)
        return self.drafts[path]

    def origins(self, path: str) -> dict[str, str]:
        """What the file's imported names stand for."""
        return origins(self.draft(path).as_source)

    def lineage(self, entry: ClassIndex) -> list[ClassIndex]:
        """The class and its bases in the project, nearest first."""
        return [entry, *self.table.ancestors(entry)]

    def is_module(self, entry: ClassIndex) -> bool:
        return self.table.effective(entry).is_module

    def children(self, entry: ClassIndex) -> Iterator[tuple[ClassIndex, str, ast.Call]]:
        """The modules that the class builds, each with the method that does it, and the call."""
        owner = self.draft(entry.span.path).class_named(entry.qualname)
        stands_for = self.origins(entry.span.path)
        for method in _constructing(owner):
            for node in ast.walk(method):
                if not isinstance(node, ast.Call) or (text := dotted_text(node.func)) is None:
                    continue
                head, dot, rest = text.partition(".")
                child = self.table.resolve(stands_for.get(head, head) + dot + rest, entry)
                if child is not None and key_of(child) != key_of(entry) and self.is_module(child):
                    yield child, method.name, node

    def scripted(self, name: str) -> str | None:
        """Where some file compiles a class of that name, or an object of it, by torch.jit.script."""
        called = re.compile(rf"\bjit\.script\(\s*(?:\w+\.)*{re.escape(name)}\b")
        for path, document in sorted(self.documents.items()):
            if found := called.search(document.text):
                return f"{path}:{document.text.count(chr(10), 0, found.start()) + 1}"
        return None


def key_of(entry: ClassIndex) -> Key:
    return entry.span.path, entry.qualname


def has_mixin(entry: ClassIndex) -> bool:
    """Whether the class names the mixin among its own bases."""
    return any(base.rpartition(".")[2] == MIXIN for base in entry.bases)


@dataclass(frozen=True)
class Found:
    """The project of some files, and those that could not be read or parsed."""

    project: Project
    files: Mapping[str, SourceFile]
    failures: tuple[Failure, ...]


def read_project(files: Sequence[SourceFile], named: Container[str] = ()) -> Found:
    """Every file read and indexed; one without a class is parsed only where somebody named it."""
    documents: dict[str, Document] = {}
    indexes: list[FileIndex] = []
    failures: list[Failure] = []
    for file in files:
        try:
            document = Document(file.path, read(file))
            if _CLASS.search(document.text) or file.path in named:
                indexes.append(_index(file.path, document.text))
            documents[file.path] = document
        except Unreadable as error:
            failures.append(Failure(file.path, error.line, str(error)))
        except SyntaxError as error:
            failures.append(Failure(file.path, error.lineno or 0, f"not valid Python: {error.msg}"))
        except (ValueError, RecursionError, MemoryError) as error:
            failures.append(Failure(file.path, 0, f"cannot be parsed: {error}"))
    project = Project(ClassTable(indexes), documents)
    return Found(project, {file.path: file for file in files}, tuple(failures))


_CLASS = re.compile(r"\bclass\b")


def _index(path: str, text: str) -> FileIndex:
    try:
        return index_file(path, text)
    except SyntaxError:
        older = in_older_syntax(text)
        if older is None:
            raise
        return index_file(path, older)


def _constructing(owner: ast.ClassDef) -> list[ast.FunctionDef]:
    """`__init__`, and what it calls on the object while it builds."""
    methods = {each.name: each for each in owner.body if isinstance(each, ast.FunctionDef)}
    waiting, reached = ["__init__"], dict[str, ast.FunctionDef]()
    while waiting:
        name = waiting.pop()
        if name in methods and name not in reached:
            reached[name] = methods[name]
            waiting += [
                node.func.attr
                for node in ast.walk(methods[name])
                if isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "self"
            ]
    return list(reached.values())
