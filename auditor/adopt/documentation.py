"""The two parameters in the docstring that tells of the others, in its own style."""

import ast
import re

from auditor.adopt.constructor import SWITCH, THRESHOLD, constructor_of
from auditor.adopt.draft import Draft

_GOOGLE = re.compile(r"^(\s*)(?:Args|Arguments|Parameters|Params):\s*$")
_NUMPY = re.compile(r"^(\s*)Parameters\s*$")
_SPHINX = re.compile(r"^(\s*):(?:param|type)\b")
_TYPED = re.compile(r"^\s*\*{0,2}\w+\s*\([^)]*\)\s*:")
_SWITCH_SAYS = "take large temporaries from a memory pool"
_THRESHOLD_SAYS = "smaller ones stay plain memory; None leaves that to the pool"


def documented(draft: Draft, owner: str) -> Draft:
    """The docstring of the constructor or of the class with both parameters, where there is one to extend."""
    node = draft.class_named(owner)
    init = constructor_of(node)
    texts = [text for each in (init, node) if each is not None and (text := _docstring(draft, each))]
    if any(SWITCH in draft.source(text) for text in texts):
        return draft
    for text in texts:
        first, last = text.lineno, text.end_lineno or text.lineno
        for style in (_google, _numpy, _sphinx):
            if (extended := style(draft, first, last)) is not None:
                return extended
    return _said(draft, texts[-1]) if texts else draft


def _docstring(draft: Draft, owner: ast.ClassDef | ast.FunctionDef) -> ast.expr | None:
    """The docstring if it is written in one piece in triple quotes, alone on its lines."""
    match owner.body[0]:
        case ast.Expr(value=ast.Constant(value=str()) as text) as statement:
            source = draft.source(text)
            quoted = re.match(r"[rRuU]?(\"\"\"|''')", source)
            whole = quoted is not None and source.endswith(quoted[1]) and source.count(quoted[1]) == 2
            return text if whole and draft.alone(statement) else None
    return None


def _google(draft: Draft, first: int, last: int) -> Draft | None:
    for row in range(first, last):
        if (header := _GOOGLE.match(draft.lines[row - 1])) is None:
            continue
        entries = _section(draft, row + 1, last, len(header[1]))
        if not entries:
            return None
        indent = draft.indent(entries[0])
        kinds = (" (bool)", " (float)") if _TYPED.match(draft.lines[entries[0] - 1]) else ("", "")
        new = [
            f"{indent}{SWITCH}{kinds[0]}: {_SWITCH_SAYS}",
            f"{indent}{THRESHOLD}{kinds[1]}: {_THRESHOLD_SAYS}",
        ]
        return draft.with_lines(entries[-1] + 1, new)
    return None


def _numpy(draft: Draft, first: int, last: int) -> Draft | None:
    for row in range(first, last - 1):
        header = _NUMPY.match(draft.lines[row - 1])
        if header is None or set(draft.lines[row].strip()) != {"-"}:
            continue
        indent = header[1]
        end = row + 1
        for at in range(row + 2, last):
            text = draft.lines[at - 1]
            underlined = draft.lines[at].strip() if at < last else ""
            if underlined and set(underlined) == {"-"}:
                break
            end = at if text.strip() else end
        new = [
            f"{indent}{SWITCH} : bool",
            f"{indent}    Take large temporaries from a memory pool.",
            f"{indent}{THRESHOLD} : float, optional",
            f"{indent}    Smaller ones stay plain memory; None leaves that to the pool.",
        ]
        return draft.with_lines(end + 1, new)
    return None


def _sphinx(draft: Draft, first: int, last: int) -> Draft | None:
    rows = [row for row in range(first, last) if _SPHINX.match(draft.lines[row - 1])]
    if not rows:
        return None
    indent, end = draft.indent(rows[-1]), rows[-1]
    while end + 1 < last and draft.lines[end].strip() and draft.indent(end + 1) > indent:
        end += 1
    new = [f"{indent}:param {SWITCH}: {_SWITCH_SAYS}", f"{indent}:param {THRESHOLD}: {_THRESHOLD_SAYS}"]
    return draft.with_lines(end + 1, new)


def _section(draft: Draft, row: int, last: int, outer: int) -> list[int]:
    """The rows of a section that are not blank: those indented more than its header."""
    found = []
    for at in range(row, last + 1):
        text = draft.lines[at - 1]
        if not text.strip():
            continue
        if len(draft.indent(at)) <= outer or text.strip() in ('"""', "'''"):
            break
        found.append(at)
    if found and draft.lines[found[-1] - 1].rstrip().endswith(('"""', "'''")):
        return []  # the closing quotes stand behind the last entry
    return found


def _said(draft: Draft, text: ast.expr) -> Draft:
    """A docstring without a list of parameters gets a paragraph."""
    first, last = text.lineno, text.end_lineno or text.lineno
    indent = draft.indent(first)
    told = [
        f"{indent}`{SWITCH}`: take large temporaries from a memory pool; those below",
        f"{indent}`{THRESHOLD}` stay plain memory.",
    ]
    closing = draft.lines[last - 1].strip()
    if closing in ('"""', "'''"):
        return draft.with_lines(last, ["", *told])
    row, column = draft.end(text)
    place = (row, column - 3)
    return draft.replaced((place, place, "\n".join(["", "", *told, indent])))
