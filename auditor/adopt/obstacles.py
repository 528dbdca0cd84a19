"""Classes that cannot take a mixin, whatever they allocate: each with the reason."""

import ast

from auditor.adopt.draft import Draft, Refused
from auditor.adopt.project import Project, has_mixin
from auditor.source.entries import ClassIndex
from auditor.source.imports import dotted_text


def refuse_strange(draft: Draft, entry: ClassIndex, project: Project) -> None:
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
