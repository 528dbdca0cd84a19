"""Canonical conditions: two tests that ask the same thing get the same key, so that branches correlate."""

import ast
import re
from dataclasses import dataclass

from auditor.ir.ops import Path
from auditor.ir.standing import asks_for_a_file, asks_for_a_stream, asks_itself
from auditor.source.nodes import walk

PURE_CALLS = frozenset(
    {
        "isinstance",
        "issubclass",
        "hasattr",
        "callable",
        "len",
        "is_tensor",
        "is_available",
        "is_initialized",
        "is_grad_enabled",
        "is_scripting",
        "is_compiling",
    }
)
"""Calls whose answer does not change between two tests of the same names."""

GRANTED = frozenset({"is_ok", "ok", "is_success", "success", "succeeded", "was_successful",
                     "allowed", "is_allowed", "granted", "is_granted"})  # fmt: skip
REFUSED = frozenset({"is_err", "is_error", "is_failure", "failed", "is_out_of_memory", "is_not_found"})
"""What an object that stands for an outcome says of itself: there is something in it, or there is not."""

EXISTENCE = frozenset({"exists", "lexists", "isdir", "isfile", "is_dir", "is_file"})

BARE = frozenset({"ok", "is_success", "is_error", "failed"})

SENTINEL = re.compile(
    r"_?(?:[A-Z0-9]+_)*(?:PAD|INVALID|NONE|NULL|NIL|MISSING|EMPTY|SENTINEL|UNSET|ABSENT|NO|NOT|FAILED)(?:_[A-Z0-9]+)*"
)
"""Constants that stand for no lease: `slot == NO_SLOT`."""

NOTHING = re.compile(r"(?:Exception|Error|Err|Failure|NoneType|Warning)$")
"""Classes of what is there instead of a lease: `isinstance(result, Exception)`."""

_NEGATED = {ast.NotEq: ast.Eq, ast.IsNot: ast.Is, ast.NotIn: ast.In, ast.GtE: ast.Lt, ast.LtE: ast.Gt}
_SYMBOL = {ast.Eq: "==", ast.Is: "is", ast.In: "in", ast.Lt: "<", ast.Gt: ">"}


@dataclass(frozen=True, slots=True)
class Condition:
    """`key` is true exactly when the test is `positive`. `subject` and `kind` as in `ops.Assume`."""

    key: str
    positive: bool
    names: frozenset[str]
    subject: ast.expr | None = None
    kind: str = "truth"
    other: ast.expr | None = None


def condition(test: ast.expr) -> Condition | None:
    """The canonical form of a test without `and`, `or`, `not`; None when asking twice may answer
    differently."""
    names = _names(test)
    if names is None:
        return None
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _comparison(test, names)
    named, itself = asks_for_a_file(test), asks_itself(test)
    if named is not None:
        return Condition(ast.unparse(test), True, names, *named)
    if itself is not None:
        return Condition(ast.unparse(test), True, names, *itself)
    outcome = _outcome(test)
    if outcome is not None:
        return Condition(ast.unparse(test), True, names, outcome[0], "granted" if outcome[1] else "refused")
    if isinstance(test, ast.Call) and is_length(test):
        return Condition(ast.unparse(test.args[0]), True, names, test.args[0])
    sort = _sort_asked_for(test)
    if sort is not None:
        return Condition(ast.unparse(test), True, names, sort[0], sort[1])
    return Condition(ast.unparse(test), True, names, test)


def _sort_asked_for(test: ast.expr) -> tuple[ast.expr, str] | None:
    """`isinstance(got, Slot)`: there is a slot; `isinstance(got, Exception)`: there is none.

    A tensor or a built-in container that something is not may still be the other thing that is lent."""
    match test:
        case ast.Call(func=ast.Name(id="isinstance"), args=[asked, ast.Name() | ast.Attribute() as cls]):
            name = called_name(cls)
            if NOTHING.search(name):
                return asked, "error"
            return (asked, "typed") if name[:1].isupper() and name != "Tensor" else None
    return None


def _outcome(test: ast.expr) -> tuple[ast.expr, bool] | None:
    """The outcome that `status.is_ok()` or `result.success` asks about, and whether it asks for success.

    `.ok` without a call is what HTTP libraries say of a response that is open either way."""
    called = isinstance(test, ast.Call) and not test.args and not test.keywords
    asked = test.func if isinstance(test, ast.Call) and called else test
    if not isinstance(asked, ast.Attribute) or (not called and asked.attr in BARE):
        return None
    if asked.attr in GRANTED | REFUSED:
        return asked.value, asked.attr in GRANTED
    return None


def _comparison(test: ast.Compare, names: frozenset[str]) -> Condition:
    op, left, right = test.ops[0], test.left, test.comparators[0]
    positive = type(op) not in _NEGATED
    kind = _NEGATED.get(type(op), type(op))
    if kind in (ast.Is, ast.Eq) and _is_none(right):
        return Condition(f"{ast.unparse(left)} is None", positive, names, left, "none")
    if kind in (ast.Is, ast.Eq) and isinstance(right, ast.Constant) and isinstance(right.value, bool):
        return Condition(ast.unparse(left), positive == right.value, names, left)
    size = _emptiness(left, op, right)
    if size is not None:
        return Condition(ast.unparse(size[0]), size[1], names, size[0])
    if kind is ast.Eq and isinstance(right, ast.Constant) and right.value == 0:
        return Condition(f"{ast.unparse(left)} == 0", positive, names, left, "zero")
    some = _above_zero(op, right)
    if some is not None:
        return Condition(f"{ast.unparse(left)} > 0", some, names, left, "some")
    sentinel = _below_zero(op, right)
    if sentinel is not None:
        return Condition(f"{ast.unparse(left)} < 0", sentinel, names, left, "absent")
    key = f"{ast.unparse(left)} {_SYMBOL.get(kind, kind.__name__)} {ast.unparse(right)}"
    if kind in (ast.Is, ast.Eq) and SENTINEL.fullmatch(called_name(right)):
        return Condition(key, positive, names, left, "absent")
    if kind in (ast.Is, ast.Eq) and _is_a_constant(left, right):
        return Condition(key, positive, names, left, "absent", right)
    if kind is ast.Is or (kind is ast.Eq and _held_by_another(left, right)):
        return Condition(key, positive, names, left, "same", right)
    stream = asks_for_a_stream(test)
    among = right if isinstance(right, ast.Name | ast.Attribute) else None
    return Condition(key, positive, names, left, stream, among) if stream else Condition(key, positive, names)


def _is_a_constant(left: ast.expr, right: ast.expr) -> bool:
    """`slot == END` of a whole name: of all that may be lent none is a constant."""
    return isinstance(left, ast.Name) and isinstance(right, ast.Name) and right.id.isupper()


def _held_by_another(left: ast.expr, right: ast.expr) -> bool:
    """`fd == self.fd`: what was just handed out equals nothing that others hold; a number equals a number."""
    sides = {type(left), type(right)}
    return ast.Attribute in sides and sides <= {ast.Name, ast.Attribute}


def _emptiness(left: ast.expr, op: ast.cmpop, right: ast.expr) -> tuple[ast.expr, bool] | None:
    """`len(x) > 0` and its kin ask whether x is non-empty."""
    if not (is_length(left) and isinstance(right, ast.Constant) and isinstance(right.value, int)):
        return None
    assert isinstance(left, ast.Call)
    answers = {
        (ast.Gt, 0): True,
        (ast.NotEq, 0): True,
        (ast.GtE, 1): True,
        (ast.Eq, 0): False,
        (ast.Lt, 1): False,
    }
    answer = answers.get((type(op), right.value))
    return None if answer is None else (left.args[0], answer)


def _above_zero(op: ast.cmpop, right: ast.expr) -> bool | None:
    """`granted > 0` and its kin ask whether there is any of it at all."""
    if not isinstance(right, ast.Constant) or type(right.value) is not int:
        return None
    answers = {(ast.Gt, 0): True, (ast.GtE, 1): True, (ast.LtE, 0): False, (ast.Lt, 1): False}
    return answers.get((type(op), right.value))


def _below_zero(op: ast.cmpop, right: ast.expr) -> bool | None:
    """`fd < 0`, `fd == -1` ask whether there is a number at all; True where the test is true for none."""
    try:
        bound = ast.literal_eval(right)
    except ValueError:
        return None
    answers = {(ast.Lt, 0): True, (ast.Eq, -1): True, (ast.LtE, -1): True,
               (ast.GtE, 0): False, (ast.NotEq, -1): False, (ast.Gt, -1): False}  # fmt: skip
    return answers.get((type(op), bound)) if isinstance(bound, int) and not isinstance(bound, bool) else None


def is_length(node: ast.AST) -> bool:
    """`len(xs)`."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "len"
        and len(node.args) == 1
    )


def asks_length(test: ast.AST) -> bool:
    """`if len(xs):`, `len(xs) == 0`"""
    return is_length(test.left if isinstance(test, ast.Compare) else test)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _names(test: ast.expr) -> frozenset[str] | None:
    """Roots and `.attributes` read by the test, or None where it is not a pure question."""
    found: set[str] = set()
    for node in walk(test):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add("." + node.attr)
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name not in PURE_CALLS and not (name in GRANTED | REFUSED and _asks_nothing_else(node)):
                return None
        elif isinstance(
            node,
            (
                ast.Await,
                ast.Yield,
                ast.YieldFrom,
                ast.NamedExpr,
                ast.Lambda,
                ast.ListComp,
                ast.SetComp,
                ast.DictComp,
                ast.GeneratorExp,
                ast.JoinedStr,
            ),
        ):
            return None
    return frozenset(found)


def path_tested(test: ast.Call) -> ast.expr | None:
    """The path whose existence a call asks about: `os.path.exists(p)`, `p.is_dir()`."""
    if not isinstance(test.func, ast.Attribute) or test.func.attr not in EXISTENCE or test.keywords:
        return None
    owner = test.func.value
    as_function = isinstance(owner, ast.Attribute) and owner.attr == "path"
    as_function = as_function or (isinstance(owner, ast.Name) and owner.id in ("os", "osp", "path"))
    if as_function:
        return test.args[0] if len(test.args) == 1 else None
    return owner if not test.args else None


def polled(asked: ast.expr) -> ast.expr | None:
    """The process of `process.poll()`, which answers None as long as it runs: what has ended is not owed."""
    match asked:
        case ast.Call(func=ast.Attribute(value=process, attr="poll"), args=[], keywords=[]):
            return process
    return None


def _asks_nothing_else(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and not call.args and not call.keywords


def path_of(node: ast.expr) -> Path | None:
    """The access path that an expression spells, if it spells one: names, attributes, subscripts."""
    components: list[str] = []
    while True:
        if isinstance(node, ast.Attribute):
            components.append("." + node.attr)
            node = node.value
        elif isinstance(node, ast.Subscript) and not isinstance(node.slice, (ast.Slice, ast.Tuple)):
            components.append(item_component(node.slice))
            node = node.value
        elif isinstance(node, ast.Name):
            components.append(node.id)
            return tuple(reversed(components))
        else:
            return None


def item_component(key: ast.expr) -> str:
    """`[0]` and `['name']` for constant keys, `[*]` for computed ones."""
    if isinstance(key, ast.Constant) and isinstance(key.value, (int, str)):
        return f"[{key.value!r}]"
    return "[*]"


def called_name(node: ast.expr) -> str:
    """The last name of what is called, or of the expression itself; empty where it has none."""
    callee = node.func if isinstance(node, ast.Call) else node
    return callee.attr if isinstance(callee, ast.Attribute) else getattr(callee, "id", "")
