"""Fields that tell about an object which a pool lends, and lead nobody back to it: `channel.sent`."""

import ast
import re
from collections.abc import Iterator

from auditor.flow.effects import Handle, Value
from auditor.project.code.annotations import type_named
from auditor.project.code.bindings import assignments, own_attribute, ways
from auditor.project.code.class_model import ClassModel
from auditor.project.code.modules import Class, Function, last_part
from auditor.project.pools.halves import Half, Pair
from auditor.project.pools.known_by import known_by
from auditor.project.pools.lent_objects import lent_class, stored_class
from auditor.project.pools.made_of_numbers import numbered_fields
from auditor.project.pools.plain_memory import is_row
from auditor.project.shapes.field_work import field_work
from auditor.project.shapes.reference_counts import counts_what_it_returns
from auditor.protocols.vocabulary import split
from auditor.source.nodes import walk

_ARRAY = r"(?:(?:torch\.)?Tensor|(?:np|numpy)\.ndarray|bytearray|(?:array\.)?array)\b"
_ONE = r"(?:int|float|bool|str|bytes)\b"
_SEVERAL = r"(?:Optional\[)?(?:{0}|(?:[Dd]ict|[Ll]ist|[Ss]et|Sequence|deque)\[(?:{0}(?:, )?)+\])"
PLAIN = re.compile(_SEVERAL.format(rf"(?:{_ONE}|{_ARRAY})"))
"""Annotations of what cannot hold the object that it is a field of."""

SCALAR = re.compile(_SEVERAL.format(_ONE))
"""Those of them that are no memory."""

NUMBER = re.compile(r"(?:int|float|bool)\b")

KNOWN_BY = frozenset({"id", "ids", "key", "name", "index", "idx", "slot", "row", "page", "block", "fd",
                      "fileno", "pid", "port", "handle", "number", "no", "address", "addr", "ptr", "token",
                      "uid", "rid"})  # fmt: skip
"""Words in the names of numbers by which an object may be found again."""

NO_NUMBER = re.compile(rf"(?:Optional\[)?(?:(?:float|bool)\b|{_ARRAY})")
"""The same of an object that stands for a number: whoever has the number may give it back."""

_MADE = re.compile(
    r"(?P<array>(?:torch|np|numpy)\.(?:empty|zeros|ones|full|arange|tensor|array|rand\w*)\()"
    r"|(?:(?:array\.)?array|bytearray|bytes|int|float|str|bool|len|time\.(?:time|monotonic|perf_counter)(?:_ns)?)\("
)
"""Calls that make nothing which could hold the object."""

FLOATS = re.compile(r"(?:Optional\[)?(?:[Ll]ist|Sequence)\[float\]")
"""Annotations of what nobody finds anything by."""

_MEASURING = frozenset({"range", "sum", "len", "list", "tuple", "any", "all", "sorted", "enumerate"})
"""Builtins that say something about what they are given."""

SET_ALONE = re.compile(r"^[^=([\n]+=(?!=)", re.MULTILINE)
"""Left sides such as `point.x, point.y =`: there nothing is known by a field."""

OBJECTS = (Value.OBJECT, Value.INDEX)
"""What may have fields: not a tensor, not an amount."""


def telling_fields(model: ClassModel, pair: Pair, *, memory: bool = True) -> frozenset[str]:
    """As pieces of paths: `.sent`. None where the pool takes back less than the object, or knows it by the
    field. `memory`: arrays, too, though whoever has a view of one may keep the object alive."""
    halves = [each for each in pair.acquires if each.handle is Handle.RESULT and each.value in OBJECTS]
    if not halves:
        return _of_what_is_counted(model, pair)
    halves = _without_relays(halves)
    lent = {lent_class(model, pair.owner, half.function) for half in halves} - {None}
    cls = lent.pop() if len(lent) == 1 else None
    promised = {_promised(half.function) for half in halves}
    if cls is None and len(promised) == 1 and pair.owner is not None:
        cls = _by_type_argument(model, pair.owner)
    if cls is None and len(halves) == 1 and pair.owner is not None:
        cls = stored_class(model, pair.owner, halves[0].function)
    if cls is None or not all(
        _wants(model, half, cls, promised) for half in _without_relays(list(pair.releases))
    ):
        return frozenset()
    told = PLAIN if all(half.value is Value.OBJECT for half in halves) else NO_NUMBER
    if not memory:
        told = SCALAR
    plain = {name for each in model.lineage(cls) for name in _plain_fields(each, told)}
    plain |= {name for each in model.lineage(cls) for name in _plain_properties(each)}
    if _counts_users(pair):
        plain |= {name for name in _fields_of(cls) if KNOWN_BY.isdisjoint(split(name))}
    if told is not NO_NUMBER and (pool := pair.owner) is not None:
        plain |= numbered_fields(cls, pool)
        return frozenset(f".{name}" for name in plain if not known_by(pool, name, pair))
    books = SET_ALONE.sub("", (pair.owner or halves[0].function.module).text)
    floats = {name for each in model.lineage(cls) for name in _plain_fields(each, FLOATS)}
    return frozenset(f".{name}" for name in plain if name in floats or not _goes_by(books, name))


def scalar_fields(model: ClassModel, cls: Class) -> frozenset[str]:
    """Of an object that has to be closed itself, the numbers and texts that it begins with or is told: none
    of them can do that. What it got from a call may be the number of what it holds."""
    inits = (init for each in model.lineage(cls) if (init := each.methods.get("__init__")) is not None)
    return frozenset(f".{name}" for init in inits for name in _set_plainly(init, SCALAR))


def _counts_users(pair: Pair) -> bool:
    """`entry.users += 1` of what it returns: that is undone through the entry, and not through its value."""
    ends = [half.function for half in pair.releases]
    return any(counts_what_it_returns(half.function, ends) for half in pair.acquires)


def _plain_properties(cls: Class) -> Iterator[str]:
    """`host`, which a property says is a text."""
    for name, method in cls.methods.items():
        returns = getattr(method.node, "returns", None)
        shown = method.is_property and KNOWN_BY.isdisjoint(split(name))
        if shown and returns is not None and SCALAR.fullmatch(ast.unparse(returns)):
            yield name


def _fields_of(cls: Class) -> Iterator[str]:
    for node in cls.node.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
    init = cls.methods.get("__init__")
    for target, _ in assignments(init) if init is not None else ():
        if (name := own_attribute(target, init.owner or "" if init else "")) is not None:
            yield name


def _without_relays(halves: list[Half]) -> list[Half]:
    """But for `take_many(n)`, which takes them one by one by the pool's own `take()`."""
    names = {half.function.name for half in halves}
    return [
        half
        for half in halves
        if not any(
            own_attribute(call.func, half.function.owner or "") in names - {half.function.name}
            for call in half.function.calls
        )
    ] or halves


def _of_what_is_counted(model: ClassModel, pair: Pair) -> frozenset[str]:
    """Of `def hold(self): self.holders += 1; return self` the class's own numbers, and of `lock_path(node:
    Node)` those of a node, as far as no table goes by them: whoever was told the `adapter.rank` cannot let
    the adapter go."""
    marked = {_marked_class(model, half) for half in pair.acquires}
    cls = marked.pop() if len(marked) == 1 else None
    handles = {half.handle for half in (*pair.acquires, *pair.releases)}
    if cls is None or len(handles) != 1:
        return frozenset()
    plain = {name for name in _plain_fields(cls, NUMBER) if KNOWN_BY.isdisjoint(split(name))}
    told = {name for name in plain if not _goes_by(cls.module.text, name)}
    pool = pair.owner
    numbered = numbered_fields(cls, pool) if pool is not None and pool is not cls else frozenset[str]()
    told |= {name for name in numbered if pool is not None and not known_by(pool, name, pair)}
    return frozenset(f".{name}" for name in told)


def _marked_class(model: ClassModel, half: Half) -> Class | None:
    """The object's own, where it returns itself; that of what it is told, by its annotation."""
    function = half.function
    if half.handle is Handle.RECEIVER:
        return function.cls if half.echo else None
    arguments = getattr(function.node, "args", None)
    if half.handle is not Handle.ARGUMENT or half.argument != 0 or arguments is None:
        return None
    told = arguments.args[function.is_method :][:1]
    written = told[0].annotation if told else None
    found = type_named(model.project, (function.module, written)) if written is not None else None
    return found if isinstance(found, Class) else None


def _goes_by(books: str, name: str) -> bool:
    """`table[node.key]`, `free(node.key)`: not `min(node.rank, 4)` alone, but nobody asks which, nor
    `sum(ws.rows)`."""
    told = re.finditer(rf"[\[(,]\s*\w+\.{name}\s*[\]),]", books) if f".{name}" in books else ()
    return any(_word_before(books, found.start()) not in _MEASURING for found in told)


def _word_before(books: str, at: int) -> str:
    begins = at
    while begins and (books[begins - 1].isalnum() or books[begins - 1] == "_"):
        begins -= 1
    return books[begins:at]


def _promised(function: Function) -> str:
    """The annotation of what it returns, if that is no more than a name."""
    returns = getattr(function.node, "returns", None)
    found = re.fullmatch(r"(?:Optional\[)?(\w+)\]?(?: \| None)?", ast.unparse(returns)) if returns else None
    return found[1] if found else ""


def _by_type_argument(model: ClassModel, pool: Class) -> Class | None:
    """The one class that subclasses fill in: `class Workers(Pool[Worker])`."""
    filled = [
        (each.module, base.slice)
        for each in model.subclasses(pool)
        for base in each.node.bases
        if isinstance(base, ast.Subscript) and last_part(base.value) == pool.name
    ]
    found = {type_named(model.project, written) for written in filled}
    cls = found.pop() if len(found) == 1 else None
    return cls if isinstance(cls, Class) and "__del__" not in cls.methods else None


def _wants(model: ClassModel, half: Half, cls: Class, promised: set[str]) -> bool:
    """Whether it is given the object itself."""
    if half.handle is Handle.RECEIVER:
        return True
    arguments = getattr(half.function.node, "args", None)
    kept = field_work(half.function).put  # back in the store that it was taken from
    for told in arguments.args[half.function.is_method :] if arguments is not None else ():
        if told.annotation is not None:
            if ast.unparse(told.annotation) in promised:
                return True
            found = type_named(model.project, (half.function.module, told.annotation))
            if isinstance(found, Class) and cls in (*model.lineage(found), *model.lineage(cls)[:1]):
                return True
        if re.search(rf"\b{told.arg}\.\w+", half.function.text):
            return True
        if any(isinstance(put.value, ast.Name) and put.value.id == told.arg for put in kept):
            return True
    return False


def _plain_fields(cls: Class, plain: re.Pattern[str]) -> Iterator[str]:
    for node in cls.node.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                if plain.match(ast.unparse(annotation)):
                    yield name
    init = cls.methods.get("__init__")
    if init is not None:
        yield from _set_plainly(init, plain)
        yield from _annotated(init, plain)


def _set_plainly(init: Function, plain: re.Pattern[str]) -> Iterator[str]:
    """`self.sent = 0`, and `self.rank = rank` of an annotated parameter."""
    own = init.owner or ""
    arguments = getattr(init.node, "args", None)
    told = {each.arg for each in arguments.args if _is_plain(each.annotation, plain)} if arguments else set()
    for target, value in assignments(init):
        name = own_attribute(target, own)
        if name is None:
            continue
        if _makes_plain(value, plain) or (isinstance(value, ast.Name) and value.id in told):
            yield name


def _makes_plain(value: ast.expr, plain: re.Pattern[str]) -> bool:
    """`0`, `bytearray(size)`; of what stands for a number no other number."""
    if isinstance(value, ast.IfExp):
        return all(_makes_plain(each, plain) for each in ways(value))
    if isinstance(value, ast.Constant):
        return plain.match(type(value.value).__name__) is not None
    if _is_reckoned(value):
        return plain is not NO_NUMBER
    if isinstance(value, ast.BinOp | ast.ListComp):
        measured = any(isinstance(n, ast.Constant) and isinstance(n.value, float) for n in walk(value))
        return (plain is not NO_NUMBER or measured) and _is_full_of_numbers(value)
    made = _MADE.match(ast.unparse(value)) if isinstance(value, ast.Call) else None
    if made is None or plain is PLAIN:
        return made is not None
    if plain is NO_NUMBER:
        return made["array"] is not None or made[0].startswith(("bytearray", "array"))
    return made["array"] is None and "byte" not in made[0]


def _is_reckoned(value: ast.expr) -> bool:
    """`parent.depth + 1`"""
    match value:
        case ast.BinOp(op=ast.Add() | ast.Sub(), right=ast.Constant(value=int())):
            return True
    return False


def _is_full_of_numbers(value: ast.expr) -> bool:
    """`[0.0] * size`, `[[0.0] * width for _ in range(rows)]`"""
    return is_row(value) or (isinstance(value, ast.ListComp) and _is_full_of_numbers(value.elt))


def _annotated(init: Function, plain: re.Pattern[str]) -> Iterator[str]:
    """`self.vocab: dict[str, int] = {}`"""
    own = init.owner or ""
    for node in init.statements:
        if isinstance(node, ast.AnnAssign) and _is_plain(node.annotation, plain):
            name = own_attribute(node.target, own)
            if name is not None:
                yield name


def _is_plain(annotation: ast.expr | None, plain: re.Pattern[str]) -> bool:
    return annotation is not None and plain.match(ast.unparse(annotation)) is not None
