"""A lease kept in a field: given back by a method that ends the object's use, and before the next one is
stored."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from auditor.case import Case, Parsed
from auditor.facts import Leak, Loss, StoredField
from auditor.fixes.life import FunctionDef, enclosing_function, enclosing_statement, statements_in
from auditor.fixes.lines import above, below, indentation, unit_around
from auditor.fixes.try_finally import is_whole
from auditor.model import Edit, FixOffer, Safety

CLEANUP = re.compile(r"close|shutdown|cleanup(?:_\w+)?|release|clear_cache")
"""Methods that end an object's use, by the names that they go by."""


BEGINNINGS = ("__init__", "__post_init__")


@dataclass(frozen=True)
class Home:
    """A field with a lease in it: the class, the method that stores it, and how any method gives it back."""

    file: Parsed
    cls: ast.ClassDef
    method: FunctionDef
    store: ast.stmt
    field: str
    release: str
    needs: str = ""  # a line that keeps the pool, where the object did not

    @property
    def is_always_set(self) -> bool:
        """Whether the field exists from the beginning on."""
        for statement in self.cls.body:
            if isinstance(statement, FunctionDef) and statement.name == "__init__":
                return any(_sets(each, self.field) for each in statement.body)
        return False

    @property
    def held(self) -> str:
        """The condition under which the field holds a lease."""
        if self.is_always_set:
            return f"self.{self.field} is not None"
        return f'getattr(self, "{self.field}", None) is not None'

    def giving_back(self, margin: str, unit: str) -> list[str]:
        return [
            f"{margin}if {self.held}:",
            f"{margin}{unit}{self.release.format(f'self.{self.field}')}",
            f"{margin}{unit}self.{self.field} = None",
        ]


def _sets(statement: ast.stmt, field: str) -> bool:
    """Whether a plain statement stores something in `self.field`."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return any(_is_field(target, field) for target in targets)


def _is_field(node: ast.AST | None, field: str) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return name == field
    return False


def released_by_cleanup(case: Case) -> FixOffer | None:
    """A release in the class's cleanup method; where there is none, one, and a context manager around it."""
    lease = case.lease
    stored = next((each for each in lease.fields if _is_plain_field(each)), None) if lease else None
    home = _home(case, stored) if stored and not (stored.released_by or stored.escapes) else None
    if home is None:
        return None
    existing = next((each for each in methods(home.cls) if CLEANUP.fullmatch(each.name)), None)
    if existing is None and stored is not None and stored.partly_by:
        return None  # who gives it back on some ways leaves it in the field: the new method would do so again
    edit = _into(home, existing) if existing else _new_methods(home)
    if edit is None:
        return None
    edits = (edit, *_keeping_pool(home))
    name = existing.name if existing else "close"
    return FixOffer(Safety.UNSAFE, f"`{name}` gives back `self.{home.field}`", edits)


def released_before_store(case: Case) -> FixOffer | None:
    """A release of what the field holds, in front of the statement that stores the next lease."""
    lease = case.lease
    if lease is None:
        return None
    leak = next((each for each in lease.leaks if each.loss is Loss.OVERWRITTEN), None)
    if leak is not None:
        return _before_overwriting(case, leak)
    stored = next((each for each in lease.fields if each.overwrite is not None), None)
    home = _home(case, stored) if stored and _is_plain_field(stored) else None
    if home is None or home.needs or not is_whole(home.file, home.store):
        return None
    if home.method.name in BEGINNINGS:
        return None  # where the object begins there is nothing yet: it is for the method that overwrites it
    margin = indentation(home.file.lines[home.store.lineno - 1])
    lines = home.giving_back(margin, unit_around(home.file, home.store))
    edit = above(home.file, home.store, lines)
    return FixOffer(
        Safety.UNSAFE, f"release of what `self.{home.field}` holds before it is overwritten", (edit,)
    )


def _before_overwriting(case: Case, leak: Leak) -> FixOffer | None:
    """`self.x = pool.acquire()` twice in one method: the first one is given back before the second."""
    file, lease, field = case.file, case.lease, leak.holder.removeprefix("self.")
    if file is None or lease is None or lease.giving_back is None or not field.isidentifier():
        return None
    for node in ast.walk(file.tree):
        plain = isinstance(node, (ast.Assign, ast.AnnAssign)) and _sets(node, field)
        if isinstance(node, ast.stmt) and plain and node.lineno == leak.at.line:
            if not is_whole(file, node) or node.lineno <= lease.span.line:
                return None
            margin = indentation(file.lines[node.lineno - 1])
            edit = above(file, node, [margin + lease.giving_back.call.format(f"self.{field}")])
            return FixOffer(Safety.UNSAFE, f"release of `self.{field}` before it is overwritten", (edit,))
    return None


def _is_plain_field(stored: StoredField) -> bool:
    return stored.field.path.isidentifier() and stored.field.root == "self"


# Where it lives ---------------------------------------------------------------------------------------------


def _home(case: Case, stored: StoredField) -> Home | None:
    """None where the class is in another file, or nothing says how a method of it would release."""
    file, lease = case.file, case.lease
    if file is None or lease is None or lease.giving_back is None or stored.at.path != file.path:
        return None
    store = _store_at(file, stored)
    method = enclosing_function(file, store) if store is not None else None
    cls = file.parents[method] if method is not None else None
    if store is None or method is None or not isinstance(cls, ast.ClassDef):
        return None
    if cls.name != stored.field.owner.rpartition(".")[2] or not method.args.args:
        return None
    if method.args.args[0].arg != "self" or lease.giving_back.call.startswith("await "):
        return None
    found = _for_any_method(lease.giving_back.call, cls, method)
    return Home(file, cls, method, store, stored.field.path, *found) if found else None


def _store_at(file: Parsed, stored: StoredField) -> ast.stmt | None:
    """The statement that puts the lease into the field."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.expr | ast.stmt) and node.lineno == stored.at.line:
            statement = enclosing_statement(file, node)
            if isinstance(statement, (ast.Assign, ast.AnnAssign)) and _sets(statement, stored.field.path):
                return statement
    return None


def _for_any_method(call: str, cls: ast.ClassDef, method: FunctionDef) -> tuple[str, str] | None:
    """The release as another method would write it, and the statement that has to keep the pool for it."""
    if call.startswith(("self.", "{")):
        return call, ""
    root, dot, rest = call.partition(".")
    parameters = {arg.arg for arg in (*method.args.args, *method.args.kwonlyargs)}
    if root not in parameters:
        return (call, "") if dot and not _is_local(root, method) else None
    for statement in method.body:
        match statement:
            case ast.Assign(
                targets=[ast.Attribute(value=ast.Name(id="self"), attr=kept)], value=ast.Name(id=name)
            ) if name == root:
                return f"self.{kept}.{rest}", ""
    taken = (each for other in methods(cls) for each in statements_in(other.body))
    if method.name != "__init__" or any(_sets(each, f"_{root}") for each in taken):
        return None
    return f"self._{root}.{rest}", f"self._{root} = {root}"


def _is_local(name: str, method: FunctionDef) -> bool:
    return any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)
        for node in ast.walk(method)
    )


def methods(cls: ast.ClassDef) -> Iterator[FunctionDef]:
    """The plain methods of a class."""
    for statement in cls.body:
        if isinstance(statement, ast.FunctionDef):
            yield statement


# The edits --------------------------------------------------------------------------------------------------


def _keeping_pool(home: Home) -> Iterator[Edit]:
    """The statement that keeps the pool, in front of the one that stores the lease."""
    if home.needs:
        margin = indentation(home.file.lines[home.store.lineno - 1])
        yield above(home.file, home.store, [margin + home.needs])


def _into(home: Home, method: FunctionDef) -> Edit | None:
    """At the beginning of the cleanup method that there is, when it has not let go of the pool yet."""
    said = isinstance(method.body[0], ast.Expr) and isinstance(method.body[0].value, ast.Constant)
    first = method.body[1] if said and len(method.body) > 1 else method.body[0]
    if not is_whole(home.file, first) or first.lineno == method.lineno:
        return None
    margin = indentation(home.file.lines[first.lineno - 1])
    lines = home.giving_back(margin, unit_around(home.file, first))
    if said and first is method.body[0]:
        return below(home.file, first, lines)
    return above(home.file, first, lines)


def _new_methods(home: Home) -> Edit | None:
    """`close`, and what makes the object its own context manager, below the last method."""
    last = home.cls.body[-1]
    if not is_whole(home.file, last) or last.lineno == home.cls.lineno:
        return None
    margin = indentation(home.file.lines[home.cls.body[0].lineno - 1])
    unit = unit_around(home.file, home.cls.body[0])
    typed = any(method.returns is not None for method in methods(home.cls))
    none, own, anything = (" -> None", f' -> "{home.cls.name}"', ": object") if typed else ("", "", "")
    lines = ["", f"{margin}def close(self){none}:", f'{margin}{unit}"""Give back what this object holds."""']
    lines += home.giving_back(margin + unit, unit)
    names = {method.name for method in methods(home.cls)}
    if not names & {"__enter__", "__exit__"}:
        lines += ["", f"{margin}def __enter__(self){own}:", f"{margin}{unit}return self", ""]
        lines += [f"{margin}def __exit__(self, *exception{anything}){none}:", f"{margin}{unit}self.close()"]
    return below(home.file, last, lines)
