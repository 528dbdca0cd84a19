"""The files that a run may rewrite: as they were, as they are by now, and the classes in them."""

import ast
import re
from collections.abc import Iterator, Sequence

from auditor.adopt.draft import Draft, Refused
from auditor.adopt.inheritance import MIXIN
from auditor.fixes.document import Document
from auditor.model import Failure
from auditor.project.class_table import ClassTable
from auditor.source.discover import SourceFile
from auditor.source.entries import ClassIndex, FileIndex, Source
from auditor.source.imports import dotted_text, origins
from auditor.source.index import index_file
from auditor.source.load import Unreadable, read
from auditor.source.newer_syntax import in_older_syntax

Key = tuple[str, str]
"""A class by the path of its file and its qualified name."""


class Project:
    """`drafts` holds the files that were rewritten; all others are what `documents` says."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self.files = {file.path: file for file in files}
        self.documents: dict[str, Document] = {}
        self.failures: list[Failure] = []
        self.drafts: dict[str, Draft] = {}
        indexes = [index for file in files if (index := self._read(file)) is not None]
        self.table = ClassTable(indexes)

    def _read(self, file: SourceFile) -> FileIndex | None:
        try:
            document = Document(file.path, read(file))
            text = document.text
        except Unreadable as error:
            self.failures.append(Failure(file.path, error.line, str(error)))
            return None
        self.documents[file.path] = document
        if not re.search(r"\bclass\b", text):
            return None
        try:
            return _index(file.path, text)
        except SyntaxError as error:
            self.failures.append(Failure(file.path, error.lineno or 0, f"not valid Python: {error.msg}"))
        except (ValueError, RecursionError, MemoryError) as error:
            self.failures.append(Failure(file.path, 0, f"cannot be parsed: {error}"))
        return None

    def draft(self, path: str) -> Draft:
        """The file as it is by now."""
        if path not in self.drafts:
            self.drafts[path] = Draft.of(path, self.documents[path].text)
        return self.drafts[path]

    def origins(self, path: str) -> dict[str, str]:
        """What the file's imported names stand for."""
        draft = self.draft(path)
        return origins(Source(path, list(draft.lines), draft.tree))

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


def refuse_strange(draft: Draft, entry: ClassIndex, project: "Project") -> None:
    """Raises Refused for a class that cannot take a mixin, whatever it allocates."""
    node = draft.class_named(entry.qualname)
    for decorator in map(_decorator, node.decorator_list):
        last = decorator.rpartition(".")[2]
        if last == "dataclass" or decorator in ("attr.s", "attrs.define", "define"):
            raise Refused("it is a dataclass: its `__init__` is generated from its fields")
        if ".jit." in f".{decorator}":
            raise Refused("it is compiled by torch.jit.script, which knows no pool")
    if any("ScriptModule" in base for base in entry.bases):
        raise Refused("it is a ScriptModule, and TorchScript knows no pool")
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    for method in methods:
        if any(".jit." in f".{_decorator(each)}" for each in method.decorator_list):
            raise Refused(f"its `{method.name}` is compiled by torch.jit.script, which knows no pool")
    if where := project.scripted(entry.name):
        raise Refused(f"{where} compiles it by torch.jit.script, which knows no pool")
    if not any(map(has_mixin, project.lineage(entry))):
        for method in methods:
            if method.name in _OF_THE_MIXIN:
                raise Refused(f"it has its own `{method.name}`, which the mixin would take over")


_OF_THE_MIXIN = frozenset(
    (
        "_init_memory_pool", "_allocate_tensor", "_deallocate_tensor", "_lease_tensor", "cleanup_memory_pool",
        "memory_pool_scope", "get_memory_info", "_pool_on", "_has_pool_state",
    )
)  # fmt: skip


def _decorator(node: ast.expr) -> str:
    return dotted_text(node.func if isinstance(node, ast.Call) else node) or ""
