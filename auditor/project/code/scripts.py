"""Functions that show how a file is used: what it calls under `if __name__ == "__main__":`, such as `main()`.

They call one method after the other, of whatever there is, and close it in the end. Whoever reads there that
`table.cancel(key)` comes before `pool.release(row)` has learnt nothing of what a user owes."""

import ast
from collections.abc import Iterator, Set

from auditor.project.code.bindings import given_to
from auditor.project.code.modules import Function, last_part
from auditor.source.nodes import walk

LOOPS = (ast.For, ast.AsyncFor, ast.While)


def is_script(function: Function) -> bool:
    """The statements of a module themselves, or a function of it that is run as the whole program."""
    if function.qualname == "<module>":
        return True
    module = function.module
    return function.cls is None and function.name in {
        last_part(node.func)
        for statement in (module.tree.body if "__main__" in module.text else ())
        if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)
        for node in walk(statement)
        if isinstance(node, ast.Call)
    }


def has_to_do_with(end: ast.Call, call: ast.Call, script: Function) -> bool:
    """They are told the same thing, or the end is told what the call answered. The object that both are
    asked of is none of that: what the call lost it has no more."""
    answered = {
        node.id
        for statement in script.statements
        if isinstance(statement, ast.Assign) and any(each is call for each in walk(statement.value))
        for target in statement.targets
        for node in walk(target)
        if isinstance(node, ast.Name)
    }
    return not (set(_told(call)) | answered).isdisjoint({*_told(end), _receiver(end)} - {_receiver(call)})


def _told(call: ast.Call) -> Iterator[str]:
    for given in (*call.args, *(keyword.value for keyword in call.keywords)):
        yield from (node.id for node in walk(given) if isinstance(node, ast.Name))


def _receiver(call: ast.Call) -> str:
    inner: ast.expr = call.func
    while isinstance(inner, ast.Attribute | ast.Subscript | ast.Call):
        inner = inner.func if isinstance(inner, ast.Call) else inner.value
    return getattr(inner, "id", "")


def ends_before_another(script: Function, name: str, ending: Set[str]) -> bool:
    """Some end comes between two calls of that name, or in a loop with one."""
    calls = sorted((call.lineno, call.col_offset) for call in script.calls if last_part(call.func) == name)
    ends = [(call.lineno, call.col_offset) for call in script.calls if last_part(call.func) in ending]
    loops = [(node.lineno, node.end_lineno or 0) for node in script.statements if isinstance(node, LOOPS)]
    return any(
        calls[0] < end < calls[-1]
        or any(first <= line <= last and first <= end[0] <= last for first, last in loops)
        for end in (ends if calls else ())
        for line, _ in calls
    )


def is_of_another_class(function: Function, call: ast.Call, method: Function) -> bool:
    """`table = LeaseTable(slots)`, and `table.cancel(key)`: that class has such a method itself."""
    match call.func:
        case ast.Attribute(value=ast.Name(id=name), attr=called):
            made = list(given_to(function, name))
        case _:
            return False
    classes = [
        function.module.classes.get(last_part(value.func)) for value in made if isinstance(value, ast.Call)
    ]
    return (
        bool(made)
        and len(classes) == len(made)
        and all(cls is not None and cls is not method.cls and called in cls.methods for cls in classes)
    )
