"""Leases that a container drops: given back one by one before it is emptied."""

import ast

from auditor.case import Case, Parsed
from auditor.facts import StoredField
from auditor.fixes.life import enclosing_function, new_name
from auditor.fixes.lines import above, indentation, unit_around
from auditor.fixes.try_finally import is_whole
from auditor.model import Edit, FixOffer, Safety, Span

DICTS = ("dict", "Dict", "Mapping")


def drained_before_drop(case: Case) -> FixOffer | None:
    """A loop that releases, in front of each `clear()` of a field."""
    lease = case.lease
    if lease is None or lease.giving_back is None or not lease.giving_back.call.startswith("self."):
        return None
    stored = next((each for each in lease.fields if each.drops and each.field.path.endswith("[*]")), None)
    if stored is None or stored.field.root != "self":
        return None
    if any(drop.parted for drop in stored.drops):
        return None  # what is given back already would be given back twice
    edits = [_loop(case, stored, drop.at, lease.giving_back.call) for drop in stored.drops]
    found = tuple(edit for edit in edits if edit is not None)
    if len(found) < len(edits):
        return None
    name = stored.field.path.partition("[")[0]
    return FixOffer(Safety.UNSAFE, f"what `self.{name}` holds is given back before it is emptied", found)


def _loop(case: Case, stored: StoredField, at: Span, call: str) -> Edit | None:
    file = case.sources.parsed(at.path)
    name = stored.field.path.partition("[")[0]
    statement = _clear(file, at, name) if file else None
    if file is None or statement is None or not is_whole(file, statement):
        return None
    function = enclosing_function(file, statement)
    entries = _entries(file, statement, name)
    if function is None or entries is None:
        return None
    margin, unit = indentation(file.lines[statement.lineno - 1]), unit_around(file, statement)
    each = new_name("lease", function)
    return above(file, statement, [f"{margin}for {each} in {entries}:", margin + unit + call.format(each)])


def _clear(file: Parsed, at: Span, name: str) -> ast.stmt | None:
    """The statement `self.name.clear()` on that line."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Expr) and node.lineno == at.line:
            return node if ast.unparse(node) == f"self.{name}.clear()" else None
    return None


def _entries(file: Parsed, statement: ast.stmt, name: str) -> str | None:
    """How to go through the field's leases: by what the class first puts there."""
    node: ast.AST = statement
    while not isinstance(node, ast.ClassDef):
        if node not in file.parents:
            return None
        node = file.parents[node]
    for each in ast.walk(node):
        if isinstance(each, (ast.Assign, ast.AnnAssign)) and each.value is not None:
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            if [ast.unparse(target) for target in targets] == [f"self.{name}"]:
                return _all_of(f"self.{name}", each.value)
    return None


def _all_of(field: str, first: ast.expr) -> str | None:
    """The expression that goes through a dict or a list like `first`."""
    text = ast.unparse(first)
    if isinstance(first, ast.Dict) or any(word in text for word in DICTS):
        return f"{field}.values()"
    return field if isinstance(first, ast.List) or text in ("list()", "deque()") else None
