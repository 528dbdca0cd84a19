"""A rewritten allocator (PA405) taken out again where the mixin that has it is at hand."""

import ast

from auditor.adopt.draft import Draft, Refused
from auditor.adopt.repairs.offer import draft_of, offered
from auditor.case import Case
from auditor.facts import Repeat
from auditor.model import FixOffer
from auditor.source.entries import module_name


def inherited(case: Case) -> FixOffer | None:
    """The mixin as a base in place of the copy; None where the code was first written in no mixin."""
    file = case.file
    found = next(
        (
            each
            for each in case.facts.repeated_allocators
            if (each.entry.span, each.entry.qualname) == (case.finding.span, case.finding.symbol)
        ),
        None,
    )
    if file is None or found is None or found.more or not _is_mixin(found):
        return None
    try:
        draft = _without_copy(draft_of(file), found)
        draft = _based(draft, found)
        if found.first.span.path != file.path:
            draft = _imported(draft, found)
    except Refused:
        return None
    return offered([(file, draft)], f"`{found.first.name}` as a base in place of the copy of its method")


def _is_mixin(found: Repeat) -> bool:
    """A class made to be a base: by its name, without a constructor, with the method under the same name."""
    first = found.first
    plain = first.name.endswith("Mixin") and "." not in first.qualname and not first.has_init
    return plain and found.allocator.name == found.first_allocator.name


def _without_copy(draft: Draft, found: Repeat) -> Draft:
    owner = draft.class_named(found.entry.qualname)
    method = next(
        each
        for each in owner.body
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name == found.allocator.name
    )
    if len(owner.body) == 1 or not draft.alone(method):
        raise Refused("nothing else is in its class")
    first = min([method.lineno, *(each.lineno for each in method.decorator_list)])
    last = method.end_lineno or method.lineno
    while first > 2 and not draft.lines[first - 2].strip():
        first -= 1  # the blank lines before it go with it
    return Draft(draft.path, (*draft.lines[: first - 1], *draft.lines[last:]))


def _based(draft: Draft, found: Repeat) -> Draft:
    owner = draft.class_named(found.entry.qualname)
    name = found.first.name
    if owner.bases:
        start = draft.start(owner.bases[0])
        return draft.replaced((start, start, f"{name}, "))
    line, column = draft.start(owner)
    end = draft.lines[line - 1].index(owner.name, column + len("class ")) + len(owner.name)
    rest = draft.lines[line - 1][end:].lstrip()
    close = end + 2 if rest.startswith("()") else end
    return draft.replaced(((line, end), (line, close), f"({name})"))


def _imported(draft: Draft, found: Repeat) -> Draft:
    """From a file of the same folder relatively, where that folder is a package of both."""
    own, other = found.entry.span.path.rpartition("/")[0], found.first.span.path.rpartition("/")[0]
    if own != other or not any(
        isinstance(node, ast.ImportFrom) and node.level == 1 for node in draft.tree.body
    ):
        raise Refused("how the other file is imported is not known")
    module = module_name(found.first.span.path).rpartition(".")[2]
    last = [node for node in draft.tree.body if isinstance(node, ast.Import | ast.ImportFrom)][-1]
    return draft.with_lines(draft.end(last)[0] + 1, [f"from .{module} import {found.first.name}"])
