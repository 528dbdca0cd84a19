"""What kind of thing an acquire hands out: a tensor, a number, or an object."""

import ast
import re
from collections.abc import Iterator, Set

from auditor.flow.effects import Value
from auditor.project.code.bindings import given_to, own_attribute, ways
from auditor.project.code.modules import Function, last_part
from auditor.project.shapes.field_work import field_work
from auditor.project.shapes.made_new import also_given
from auditor.project.shapes.markings import is_nothing
from auditor.project.shapes.name_bindings import FILLING
from auditor.project.shapes.pool_state import called, cut_short
from auditor.protocols.vocabulary import split

NUMBERED = frozenset({"slot", "slots", "block", "blocks", "page", "pages", "index", "indices", "row",
                      "rows", "kv", "token",
                      "tokens", "blocked", "kvcache", "req", "id", "ids", "seq", "chunk", "chunks", "slab",
                      "descriptor"})  # fmt: skip
"""Of these a pool hands out numbers, or objects that stand for numbers: copies of the number carry the
obligation."""

NUMBERS = frozenset(
    pattern.format(kind)
    for kind in ("int", "list[int]", "List[int]", "set[int]", "tuple[int, ...]")
    for pattern in ("{}", "Optional[{}]", "{} | None")
)
"""Annotations that say that only numbers are handed out."""

TENSORS = frozenset(
    pattern.format(kind)
    for kind in ("Tensor", "torch.Tensor")
    for pattern in ("{}", "Optional[{}]", "typing.Optional[{}]", "{} | None", "None | {}")
)
"""Annotations that say that one tensor is handed out, if any."""

ARRAYS = re.compile(r"(?:(?:typing\.)?Optional\[)?(?:\w+\.)?(?:nd)?[aA]rray\]?(?: \| None)?")
"""The same of an array, which may be full of numbers that are lent: it is asked what the pool has made."""

TENSOR_MAKERS = frozenset({"empty", "zeros", "ones", "full", "empty_like", "zeros_like", "empty_strided",
                           "new_empty",
                           "new_zeros", "as_strided", "frombuffer"})  # fmt: skip
MAKES_TENSORS = re.compile(
    rf"\btorch\.(?:{'|'.join(sorted(TENSOR_MAKERS))}|rand|randn)\("
    r"|\b(?:np|numpy|xp|cp|cupy)\.(?:empty|zeros|ones|full)(?:_like)?\("
)
INTEGERS = re.compile(r"\b(?:u?int\d*|long|bool)\b")
COUNTS = re.compile(r"(?:\w+\()?range\(")
OBJECTS = re.compile(r"(?:deque\(|list\()?[\[(]?(?:\w+\.)?_*[A-Z]\w*[a-z]\w*\(")
TAKING = frozenset({"pop", "popleft", "get", "get_nowait"})


def value_of(function: Function) -> Value:
    """What the acquire hands out, from its name, its annotation and what its body makes."""
    returns = getattr(function.node, "returns", None)
    text = ast.unparse(returns).strip("'\"") if returns is not None else ""
    says_so = not text or text in TENSORS or ARRAYS.fullmatch(text) is not None
    kept = text not in NUMBERS and not _keeps_objects(function)  # `-> Row`, which is another name for it
    stored = (says_so or kept) and _in_the_store(function) is Value.TENSOR
    if (stored or (says_so and _hands_out_memory(function))) and not _deals_out_numbers(function):
        return Value.TENSOR
    if not text and _keeps_objects(function):
        return Value.OBJECT
    owner_words = split(function.cls.name) if function.cls is not None else ()
    if NUMBERED & {*split(function.name), *owner_words} and not _looks_up(function):
        return Value.INDEX
    owner = function.owner
    for node in function.statements:
        match node:
            case ast.Assign(targets=[target], value=value):
                if cut_short(target, value, owner) and "free" in ast.unparse(target):
                    return Value.INDEX
    if _deals_out_numbers(function):
        return Value.INDEX
    if "Tensor" in text and "list" not in text.lower() and "tuple" not in text.lower():
        return Value.TENSOR
    if text in NUMBERS:
        return Value.INDEX
    if not text and any(name in TENSOR_MAKERS for name in called(function)):
        return Value.TENSOR
    if not text and _reckons_a_number(function):
        return Value.INDEX
    return Value.OBJECT if text else _in_the_store(function)


def _hands_out_memory(function: Function) -> bool:
    """Whatever its class is called: a `KVRing` may lend the memory of its blocks, or their numbers."""
    return _cuts_memory(function) or _makes_what_it_returns(function)


def _makes_what_it_returns(function: Function) -> bool:
    """`return torch.empty(self.shape)`, or by a name, or a view of it; nothing of integers, which may be
    those that are lent: a kernel fills them in."""
    work = field_work(function)
    found = [way for value in work.returned for way in ways(value)]
    return any(_is_memory(ast.unparse(each)) for each in (*found, *also_given(work)))


def _is_memory(made: str) -> bool:
    return MAKES_TENSORS.match(made) is not None and not INTEGERS.search(made)


def _reckons_a_number(function: Function) -> bool:
    """`tag = (self.hint + k) % self.depth`, `row = int(free[0])`, `for i in range(n): ... return i`: nothing
    else is returned, but for what says that there is none."""
    values = [node.value for node in function.statements if isinstance(node, ast.Return) and node.value]
    found = [each for value in values for each in ways(value) if not is_nothing(each)]
    names = {each.id for each in found if isinstance(each, ast.Name) and not each.id.isupper()}
    if len(names) != 1 or any(not isinstance(each, ast.Name) for each in found):
        return False
    given = [way for name in names for value in given_to(function, name) for way in ways(value)]
    turns = any(_is_a_turn(node, names) for node in function.statements)
    return bool(given or turns) and all(map(_is_number, given))


def _is_number(value: ast.expr) -> bool:
    match value:
        case (
            ast.Call(func=ast.Name(id="int" | "len"))
            | ast.BinOp(op=ast.Mod() | ast.FloorDiv() | ast.BitAnd())
        ):
            return not isinstance(getattr(value, "left", None), ast.Constant | ast.JoinedStr)
    return False


def _is_a_turn(node: ast.stmt, names: Set[str]) -> bool:
    """`for i in range(n)`, `for i, slot in enumerate(self.slots)`"""
    match node:
        case ast.For(target=ast.Name(id=turn), iter=ast.Call(func=ast.Name(id="range"))):
            return turn in names
        case ast.For(
            target=ast.Tuple(elts=[ast.Name(id=turn), _]), iter=ast.Call(func=ast.Name(id="enumerate"))
        ):
            return turn in names
    return False


def _keeps_objects(function: Function) -> bool:
    """`self.free = [Slot(i) for i in range(n)]`, and the slot is handed out, not its number."""
    returned = (node.value for node in function.statements if isinstance(node, ast.Return))
    found = [way for value in returned if value is not None for way in ways(value)]
    whole = all(isinstance(value, ast.Name | ast.Call | ast.Constant) for value in found)
    return whole and not _returns_another(function) and any(map(OBJECTS.match, _filling(function)))


def _looks_up(function: Function) -> bool:
    """`return self.by_id[self.free.pop()]`: what the number stands for is handed out."""
    owner = function.owner or ""
    returned = (node.value for node in function.statements if isinstance(node, ast.Return) and node.value)
    return any(
        isinstance(way, ast.Subscript)
        and own_attribute(way.value, owner) is not None
        and isinstance(way.slice, ast.Call)
        and _taken_from(way.slice, owner) is not None
        for value in returned
        for way in ways(value)
    )


def _in_the_store(function: Function) -> Value:
    """What the list was filled with that a method without an annotation takes from:
    `self.free.put(torch.zeros(n))`, `self.ids = list(range(n))`."""
    filled = [] if _returns_another(function) else _filling(function)
    if any(MAKES_TENSORS.search(text) for text in filled):
        return Value.TENSOR
    return Value.INDEX if any(COUNTS.match(text) for text in filled) else Value.OBJECT


def _filling(function: Function) -> list[str]:
    return [ast.unparse(put) for put, _ in put_into_the_store(function)]


def put_into_the_store(function: Function) -> list[tuple[ast.expr, bool]]:
    """What is put into the lists that the method takes from, and whether that is several at once."""
    owner = function.owner
    if owner is None or function.cls is None:
        return []
    taken = {name for call in function.calls if (name := _taken_from(call, owner)) is not None}
    return [
        (put, several)
        for method in function.cls.methods.values()
        for name, put, several in _filled_with(method)
        if name in taken
    ]


def _cuts_memory(function: Function) -> bool:
    """`return self.base[at : at + size]` of a tensor that the constructor made, `view = self.slab[i]`, or one
    of a list of such."""
    init = function.cls.methods.get("__init__") if function.cls is not None else None
    filled = _filled_with(init) if init is not None else ()
    made = {name for name, put, _ in filled if _is_made_of_memory(put)}
    cut = [
        (node.targets[0] if isinstance(node, ast.Assign) else node.value)
        for node in (function.statements if made else ())
        if isinstance(node, ast.Assign | ast.Return)
        and isinstance(node.value, ast.Subscript)
        and own_attribute(node.value.value, function.owner or "") in made
    ]
    returned = {
        ast.unparse(node.value) for node in function.statements if isinstance(node, ast.Return) and node.value
    }
    return any(each is not None and ast.unparse(each) in returned for each in cut)


def _is_made_of_memory(value: ast.expr) -> bool:
    match value:
        case ast.ListComp(elt=each) | ast.List(elts=[each, *_]) | ast.BinOp(left=ast.List(elts=[each])):
            return _is_memory(ast.unparse(each))
    return _is_memory(ast.unparse(value))


def _returns_another(function: Function) -> bool:
    """`return Lease(self, self.ids.pop())`, `return key, buffer`."""
    returned = (node.value for node in function.statements if isinstance(node, ast.Return))
    return any(
        isinstance(value, ast.Tuple) or (isinstance(value, ast.Call) and last_part(value.func)[:1].isupper())
        for value in returned
    )


def _taken_from(call: ast.Call, owner: str) -> str | None:
    """`free` of `self.free.popleft()` and `heappop(self.free)`."""
    match call.func:
        case ast.Attribute(value=ast.Attribute() as field, attr=way) if way in TAKING:
            return own_attribute(field, owner)
        case ast.Attribute(attr="heappop") | ast.Name(id="heappop") if call.args:
            return own_attribute(call.args[0], owner)
    return None


def _filled_with(method: Function) -> Iterator[tuple[str, ast.expr, bool]]:
    """Fields of a method's own object, what it assigns to them or puts in, and whether that is a list."""
    owner = method.owner or ""
    for node in method.statements:
        match node:
            case (
                ast.Assign(targets=[target], value=value)
                | ast.AnnAssign(target=target, value=ast.expr() as value)
            ) if (name := own_attribute(target, owner)) is not None:
                yield name, value, True
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=field, attr=way), args=[*_, put])) if (
                way in FILLING and (name := own_attribute(field, owner)) is not None
            ):
                yield name, put, "extend" in way


def _deals_out_numbers(function: Function) -> bool:
    """`return self.free[a:b]` of a free list that `__init__` made by `arange`."""
    init = function.cls.methods.get("__init__") if function.cls is not None else None
    made = {
        target.attr
        for node in (init.statements if init is not None else ())
        if isinstance(node, ast.Assign) and "arange(" in ast.unparse(node.value)
        for target in node.targets
        if isinstance(target, ast.Attribute)
    }
    return any(
        isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr in made
        for node in (function.nodes if made else ())
    )
