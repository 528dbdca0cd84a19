"""The switch into `__init__`: two parameters at the end, and the mixin's initialisation after the base's."""

import ast
from collections.abc import Iterator, Sequence

from auditor.adopt.draft import Draft, Place, Refused
from auditor.adopt.listing import Listing
from auditor.adopt.uses import Function

SWITCH, THRESHOLD = "enable_memory_pool", "memory_pool_threshold_mb"
INITIALISE = "_init_memory_pool"


def constructor_of(owner: ast.ClassDef) -> ast.FunctionDef | None:
    """The class's own `__init__`."""
    return next(
        (each for each in owner.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None
    )


def parameters(init: ast.FunctionDef) -> set[str]:
    """The names of the parameters that can be given by keyword."""
    return {each.arg for each in [*init.args.args, *init.args.kwonlyargs]}


def with_parameters(draft: Draft, owner: str) -> Draft:
    """`__init__` with the switch and the threshold at its end: positional callers do not notice."""
    init = constructor_of(draft.class_named(owner))
    assert init is not None
    there = parameters(init)
    annotation = _optional_float(draft)
    wanted = [
        (SWITCH, f"{SWITCH}: bool = False"),
        (THRESHOLD, f"{THRESHOLD}: {annotation} = None" if annotation else f"{THRESHOLD}=None"),
    ]
    new = [text for name, text in wanted if name not in there]
    if not new:
        return draft
    opened = draft.lines[init.lineno - 1].index("(") + 1
    return Listing(draft, (init.lineno, opened), last_parameter(draft, init)).with_items(new)


def last_parameter(draft: Draft, init: Function) -> Place:
    """Where the last parameter ends that others may follow: keyword-only, `*args`, or positional."""
    args = init.args
    if args.kwonlyargs:
        default = args.kw_defaults[-1]
        return draft.end(default) if default is not None else draft.end(args.kwonlyargs[-1])
    if args.vararg is not None:
        return draft.end(args.vararg)
    if not (args.args or args.posonlyargs):
        raise Refused(f"its `{init.name}` has no parameter for the object itself")
    last = [*args.posonlyargs, *args.args][-1]
    end = draft.end(args.defaults[-1] if args.defaults else last)
    if args.args:
        return _past_parentheses(draft, end, init)
    line, column = end
    slash = draft.lines[line - 1].find("/", column)
    if slash < 0:
        raise Refused(f"its `{init.name}` has its `/` on a line of its own")
    return line, slash + 1


def _past_parentheses(draft: Draft, end: Place, init: Function) -> Place:
    """The end of a default that stands in parentheses, which the tree does not know of."""
    if not init.args.defaults:
        return end
    default = init.args.defaults[-1]
    line, column = draft.start(default)
    opened = len(draft.lines[line - 1][:column].rstrip()) - len(
        draft.lines[line - 1][:column].rstrip().rstrip("(")
    )
    name = [*init.args.posonlyargs, *init.args.args][-1]
    if not opened or "=" not in draft.between(draft.end(name), draft.start(default)):
        return end
    line, column = end
    for _ in range(opened):
        closing = draft.lines[line - 1].find(")", column)
        if closing < 0:
            raise Refused("the default of its last parameter is written over several lines in parentheses")
        column = closing + 1
    return line, column


def _optional_float(draft: Draft) -> str:
    """An annotation that this file can evaluate on every Python that runs it; empty where none is certain."""
    for node in draft.tree.body:
        match node:
            case ast.ImportFrom(module="__future__", names=names) if any(
                each.name == "annotations" for each in names
            ):
                return "float | None"
            case ast.ImportFrom(module="typing", names=names) if any(
                each.name == "Optional" and each.asname is None for each in names
            ):
                return "Optional[float]"
    for each in ast.walk(draft.tree):
        match each:
            case ast.arg(annotation=ast.BinOp(op=ast.BitOr(), right=ast.Constant(value=None))) | ast.Match():
                return "float | None"
    return ""


def base_calls(owner: ast.ClassDef) -> list[ast.Expr]:
    """The statements of `__init__` itself that run a base's `__init__`. Refused where there is none."""
    init = constructor_of(owner)
    assert init is not None
    bases = {ast.unparse(base) for base in owner.bases}
    found = [each for each in init.body if _runs_base(each, bases)]
    if found:
        return [each for each in found if isinstance(each, ast.Expr)]
    if any(_runs_base(each, bases) for each in ast.walk(init)):
        raise Refused("its `__init__` calls `super().__init__()` only under a condition or in a nested block")
    raise Refused(
        "its `__init__` never calls `super().__init__()`, so the mixin's state has no place to begin"
    )


def _runs_base(node: ast.AST, bases: set[str]) -> bool:
    match node:
        case ast.Expr(
            value=ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr="__init__"))
        ):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=base, attr="__init__"))):
            return ast.unparse(base) in bases
    return False


def initialised(draft: Draft, owner: str) -> Draft:
    """`self._init_memory_pool(...)` right after the base's `__init__`."""
    node = draft.class_named(owner)
    init = constructor_of(node)
    assert init is not None
    if any(called == INITIALISE for called in _called_on_self(init)):
        return draft
    last = base_calls(node)[-1]
    if not draft.alone(last):
        raise Refused("its `super().__init__()` shares a line with another statement")
    row = draft.end(last)[0]
    me = [*init.args.posonlyargs, *init.args.args][0].arg
    indent = draft.indent(draft.start(last)[0])
    return draft.with_lines(row + 1, [f"{indent}{me}.{INITIALISE}({SWITCH}, {THRESHOLD})"])


def handed_to_base(draft: Draft, owner: str) -> Draft:
    """The switch handed to the `__init__` of a base that is pooled itself."""
    node = draft.class_named(owner)
    calls = base_calls(node)
    if len(calls) != 1 or not isinstance(call := calls[0].value, ast.Call):
        raise Refused("its `__init__` runs several bases' `__init__`, and one of them is pooled")
    return with_arguments(draft, call)


def with_arguments(draft: Draft, call: ast.Call, *, of_self: bool = False) -> Draft:
    """The call with the switch and the threshold handed on, as far as it does not give them already.

    `of_self`: from the object, in a method that has no such parameters.
    """
    given = {word.arg for word in call.keywords}
    if None in given or any(isinstance(each, ast.Starred) for each in call.args):
        raise Refused(
            f"`{draft.source(call.func)}` is called with `*` or `**`, which may hold the switch already"
        )
    me = "self." if of_self else ""
    new = [f"{name}={me}{name}" for name in (SWITCH, THRESHOLD) if name not in given]
    return with_keywords(draft, call, new) if new else draft


def with_keywords(draft: Draft, call: ast.Call, new: Sequence[str]) -> Draft:
    """The call with keyword arguments at its end."""
    values = [*call.args, *(word.value for word in call.keywords)]
    if len(values) == 1 and isinstance(values[0], ast.GeneratorExp):
        raise Refused(f"`{draft.source(call.func)}` is called with a generator")
    row, column = draft.end(call.func)
    opened = draft.lines[row - 1].index("(", column) + 1
    return Listing(draft, (row, opened), _last_argument(draft, call)).with_items(new)


def _last_argument(draft: Draft, call: ast.Call) -> Place:
    """Where the last argument ends, parentheses around it included."""
    values: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
    line, column = draft.end(call)
    if not values:
        return line, column - 1
    last = max(draft.end(each) for each in values)
    between = draft.between(last, (line, column - 1))
    for offset, character in reversed(list(enumerate(between))):
        if character == ")" and "#" not in between:
            rows = between[: offset + 1].split("\n")
            return last[0] + len(rows) - 1, len(rows[-1]) + (last[1] if len(rows) == 1 else 0)
    return last


def _called_on_self(init: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(init):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node.func.attr


def created(draft: Draft, owner: str, *, plain_base: bool) -> Draft:
    """An `__init__` for a class that has none; `plain_base`: its base's takes no arguments."""
    node = draft.class_named(owner)
    annotation = _optional_float(draft)
    threshold = f"{THRESHOLD}: {annotation} = None" if annotation else f"{THRESHOLD}=None"
    indent = draft.indent(node.body[0].lineno)
    if not draft.alone(node.body[0]) or node.body[0].lineno == node.lineno:
        raise Refused("its body stands on the line of the class statement")
    unit = indent.removeprefix(draft.indent(node.lineno))
    star, more, given = ("", "", "") if plain_base else ("*args, ", ", **kwargs", "*args, **kwargs")
    rows = [
        f"{indent}def __init__(self, {star}{SWITCH}: bool = False, {threshold}{more}):",
        f"{indent}{unit}super().__init__({given})",
        f"{indent}{unit}self.{INITIALISE}({SWITCH}, {THRESHOLD})",
    ]
    first = next(
        (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)), None
    )
    if first is None:
        return draft.with_lines((node.end_lineno or node.lineno) + 1, ["", *rows])
    at = min([first.lineno, *(each.lineno for each in first.decorator_list)])
    while draft.lines[at - 2].lstrip().startswith("#") and draft.indent(at - 1) == indent:
        at -= 1
    return draft.with_lines(at, [*rows, ""])
