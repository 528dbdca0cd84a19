"""Finds what can be run in a file by reading it: modules, autograd functions, functions of tensors."""

import ast
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from auditor.leaktests.plan import Target
from auditor.model import Failure
from auditor.source.discover import SourceFile
from auditor.source.load import Unreadable, read

_TENSOR_WORDS = ("Tensor", "Float[", "Int[", "Bool[")
_MODULE_BASES = ("Module", "Embedding", "Linear", "Sequential", "ModuleList", "ModuleDict")
_CONFIG_ENDS = ("Config", "Configuration", "Args", "Arguments", "Params", "Settings")


@dataclass(slots=True)
class Found:
    """The targets of a tree, the configuration classes that may serve as arguments, the unreadable files."""

    targets: list[Target] = field(default_factory=list)
    configs: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Class:
    file: SourceFile
    node: ast.ClassDef
    module: str
    root: str
    bases: tuple[str, ...]


def find_targets(files: Sequence[SourceFile]) -> Found:
    """Everything to test in `files`; classes are told by their bases, which may be in other files."""
    found = Found()
    classes: list[_Class] = []
    for file in files:
        if file.path.endswith(".py") and not is_test(file.path):
            _read_file(file, found, classes)
    by_name: dict[str, list[_Class]] = {}
    for entry in classes:
        by_name.setdefault(entry.node.name, []).append(entry)
    for entry in classes:
        kind = _kind(entry, by_name, set())
        if kind:
            found.targets.append(_target(entry.file, entry.node, entry.module, entry.root, kind))
        elif entry.node.name.endswith(_CONFIG_ENDS):
            found.configs.append(f"{entry.module}:{entry.node.name}")
    found.targets.sort()
    return found


def is_test(path: str) -> bool:
    """Tests and setup scripts are run by others; importing them runs them."""
    name = path.rpartition("/")[2]
    return name in ("setup.py", "conftest.py", "__main__.py") or name.startswith("test_")


def _read_file(file: SourceFile, found: Found, classes: list[_Class]) -> None:
    try:
        tree = ast.parse(read(file))
    except (Unreadable, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", 0) or getattr(error, "line", 0) or 0
        found.failures.append(Failure(file.path, line, f"cannot be read for tests: {error}"))
        return
    module, root = import_name(file.location)
    for node in _outermost(tree):
        if isinstance(node, ast.ClassDef):
            bases = tuple(_last(base) for base in node.bases)
            classes.append(_Class(file, node, module, root, bases))
        elif isinstance(node, ast.FunctionDef) and _takes_tensors(node):
            found.targets.append(_target(file, node, module, root, "function"))


def _outermost(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements of the file, and those under its `if` and `try`."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.If | ast.Try):
            waiting[:0] = [*node.body, *node.orelse]
        else:
            yield node


def import_name(location: str) -> tuple[str, str]:
    """The dotted name of a file, and the folder from which it is importable by that name."""
    file = Path(location)
    parts = [] if file.stem == "__init__" else [file.stem]
    folder = file.parent
    while (folder / "__init__.py").exists():
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts), os.fspath(folder)


def _kind(entry: _Class, by_name: Mapping[str, Sequence[_Class]], seen: set[str]) -> str:
    if entry.node.name in seen:
        return ""
    seen.add(entry.node.name)
    for base in entry.bases:
        if any(_kind(other, by_name, seen) == "module" for other in by_name.get(base, ())):
            return "module"
        if base.endswith("Module") or base in _MODULE_BASES:
            return "module"
        if base == "Function":
            return "autograd"
    return ""


def _takes_tensors(node: ast.FunctionDef) -> bool:
    if node.name.startswith("_") or node.decorator_list:
        return False
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    texts = [ast.unparse(argument.annotation) for argument in arguments if argument.annotation]
    return any(word in text for text in texts for word in _TENSOR_WORDS)


def _target(
    file: SourceFile, node: ast.ClassDef | ast.FunctionDef, module: str, root: str, kind: str
) -> Target:
    return Target(file.path, node.lineno, module, node.name, kind, root, ast.get_docstring(node) or "")


def _last(base: ast.expr) -> str:
    """The last name of a base: `nn.Module` is Module, `Generic[T]` is Generic."""
    while isinstance(base, ast.Subscript):
        base = base.value
    return ast.unparse(base).rpartition(".")[2]
