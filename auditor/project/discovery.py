"""Finds pools in the tree: classes (and modules) that define both halves of a pair and whose bodies behave
like one.

Names only propose. The acquiring half must change the pool's state, or create and record, or pass on
another acquire, and must hand something out; the releasing half must change the pool's state or pass on
another release. A getter that changes nothing, an `allocated_gb`, a `release` with an empty body are not
halves of anything."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from auditor.flow.effects import Handle, Position, Value
from auditor.project.bindings import statements_of
from auditor.project.class_model import ClassModel
from auditor.project.modules import Class, Function, Module
from auditor.protocols.vocabulary import (
    ACQUIRE_WORDS,
    COUNTING,
    MARKS,
    RELEASE_WORDS,
    RELEASING,
    WEAK,
    Name,
    pairs_with,
    split,
    take_apart,
)

REMOVERS = frozenset(
    {"pop", "popleft", "popitem", "get", "get_nowait", "remove", "discard", "popleft_n", "pop_n"}
)
NUMBERED = frozenset({"slot", "slots", "block", "blocks", "page", "pages", "index", "indices", "row",
                      "rows", "kv", "token",
                      "tokens", "blocked", "kvcache", "req", "id", "ids", "seq", "chunk", "chunks", "slab",
                      "descriptor"})  # fmt: skip
"""Of these a pool hands out numbers, or objects that stand for numbers: copies of the number carry the
obligation."""

POOL_WORDS = frozenset({"pool", "allocator", "free", "freelist", "arena", "slab"})

MUTATORS = REMOVERS - {"get"} | frozenset(
    {"append", "appendleft", "add", "insert", "extend", "update", "put", "put_nowait", "setdefault", "clear",
     "difference_update", "fill_", "append_n", "extendleft", "copy_"}
)  # fmt: skip
TENSOR_MAKERS = frozenset({"empty", "zeros", "ones", "full", "empty_like", "zeros_like", "empty_strided",
                           "new_empty",
                           "new_zeros", "as_strided", "frombuffer"})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Half:
    """A method that acquires or releases, and how."""

    function: Function
    name: Name
    handle: Handle = Handle.RESULT
    argument: Position = 0
    value: Value = Value.OBJECT


@dataclass(frozen=True, slots=True)
class Pair:
    """One discovered protocol: the pool it belongs to, its acquiring and its releasing functions."""

    name: str
    owner: Class | None
    acquires: tuple[Half, ...]
    releases: tuple[Half, ...]


def discover(model: ClassModel, module: Module) -> Iterator[Pair]:
    """The pairs that one module defines."""
    for _, cls in sorted(module.classes.items()):
        methods = [method for name, method in sorted(cls.methods.items()) if not name.endswith("=")]
        yield from _pairs_of(cls.name, cls, methods)
    plain = [
        f
        for name, f in sorted(module.functions.items())
        if f.cls is None and f.parent is None and name != "<module>"
    ]
    yield from _pairs_of(module.path.rpartition("/")[2].removesuffix(".py"), None, plain)


def _pairs_of(name: str, owner: Class | None, functions: list[Function]) -> Iterator[Pair]:
    """One pair for what is handed out and counted, one for each kind of mark: a pin is ended by no count."""
    acquires, releases = [], []
    for function in functions:
        if {"property", "cached_property"} & set(function.decorators):
            continue
        acquiring = take_apart(function.name, ACQUIRE_WORDS)
        if acquiring is not None:
            acquires.append((function, acquiring))
        releasing = take_apart(function.name, RELEASE_WORDS)
        if releasing is not None:
            releases.append((function, releasing))
    halves = _behaving(acquires, releases)
    if halves is None:
        return
    for kind in ("", *sorted(MARKS)):
        got, given = (tuple(half for half in side if half.name.kind == kind) for side in halves)
        if got and given:
            yield Pair(f"{name}.{kind}" if kind else name, owner, got, given)


def _behaving(
    acquires: list[tuple[Function, Name]], releases: list[tuple[Function, Name]]
) -> tuple[tuple[Half, ...], tuple[Half, ...]] | None:
    got, given = [], []
    for function, name in acquires:
        partners = [
            (other, its) for other, its in releases if pairs_with(name, its) and other is not function
        ]
        partners = [
            (other, its)
            for other, its in partners
            if _gives_back(other, name) and not _is_store(function, name, other)
        ]
        if (
            not function.is_method
        ):  # functions of a module share no object: only their names tie them together
            partners = [(other, its) for other, its in partners if name.affix & its.affix]
        half = _acquiring_half(function, name, [other for other, _ in partners]) if partners else None
        if half is not None:
            got.append(half)
            given += [Half(other, its, half.handle) for other, its in partners]
    if not got:
        return None
    unique = {half.function: half for half in given}
    return tuple(got), tuple(unique.values())


def _gives_back(function: Function, acquiring: Name) -> bool:
    """The releasing half changes something, or passes on to a function that releases; interfaces are
    believed."""
    if function.is_abstract:
        return not _only_passes(function)
    if len(_own_parameters(function)) == 0 and acquiring.verb not in COUNTING and acquiring.verb != "acquire":
        return False  # it is given nothing back: a `free()` of the pool itself
    return changes_state(function) or any(
        RELEASING.fullmatch(name) or take_apart(name, RELEASE_WORDS) for name in _called(function)
    )


def _is_store(acquire: Function, name: Name, release: Function) -> bool:
    """`get(key)` and `put(key, value)` are a store's, not a pool's."""
    if name.verb not in ("get", "take", "fetch", "pop"):
        return False
    keyed = any("key" in parameter or parameter in ("name", "id") for parameter in _own_parameters(acquire))
    return keyed or len(_own_parameters(release)) > 1


def _only_passes(function: Function) -> bool:
    """A body of `pass` that nobody declared abstract does nothing."""
    body = function.node.body if isinstance(function.node.body, list) else []
    return "abstractmethod" not in function.decorators and all(
        isinstance(statement, ast.Pass) for statement in body if not _is_docstring(statement)
    )


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _acquiring_half(function: Function, name: Name, partners: list[Function]) -> Half | None:
    if {"contextmanager", "asynccontextmanager"} & set(function.decorators):
        return None
    if function.is_abstract:
        if _only_passes(function) or name.verb in WEAK - COUNTING:
            return None
        shared = _shared_key(function, partners)
        if shared is not None:
            return Half(function, name, Handle.ARGUMENT, shared, Value.OBJECT)
        handle = Handle.RECEIVER if name.verb in COUNTING else Handle.RESULT
        return Half(function, name, handle, 0, value_of(function))
    if name.verb in COUNTING or not returns_something(function):
        return _marking_half(function, name, partners)
    if name.verb == "acquire" and all(not _own_parameters(partner) for partner in partners):
        return Half(function, name, Handle.RECEIVER, 0, Value.OBJECT)  # nothing is handed back but the object
    if not _hands_out(function, name):
        return None
    keyed = _kept_under_parameter(function)
    if keyed is None:
        keyed = _shared_key(function, partners)
    if keyed is not None:
        return Half(function, name, Handle.ARGUMENT, keyed, Value.OBJECT)
    return Half(function, name, Handle.RESULT, 0, value_of(function))


def _marking_half(function: Function, name: Name, partners: list[Function]) -> Half | None:
    """It marks an object that exists already: its first argument, or the receiver where what ends it is
    told of no argument (`acquire(blocking)`, `release()`)."""
    if not changes_state(function) or name.verb == "get":
        return None
    marks_argument = _own_parameters(function) and any(_own_parameters(partner) for partner in partners)
    return Half(function, name, Handle.ARGUMENT if marks_argument else Handle.RECEIVER, 0, Value.OBJECT)


def _hands_out(function: Function, name: Name) -> bool:
    if name.verb == "pop" and not {*split(function.cls.name if function.cls else "")} & POOL_WORDS:
        return False  # an operand stack, an undo list
    if name.verb in WEAK:
        return _removes_from_state(function)
    return changes_state(function) or any(
        take_apart(called, ACQUIRE_WORDS - WEAK) for called in _called(function)
    )


# Bodies ------------------------------------------------------------------------------------------------


def _own_parameters(function: Function) -> tuple[str, ...]:
    names = function.parameters
    return names[1:] if function.is_method and not function.is_static else names


def returns_something(function: Function) -> bool:
    """Some return hands out a value that is neither None nor a plain yes or no."""
    if ast.unparse(getattr(function.node, "returns", None) or ast.Constant("")) == "bool":
        return False
    for node in statements_of(function.node):
        if isinstance(node, ast.Return) and not isinstance(
            node.value, (ast.Constant, ast.Compare, type(None))
        ):
            return True
    return False


def _own_state(node: ast.AST, owner: str | None) -> bool:
    """An attribute of self, or a module's global, at the root of an expression."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        if isinstance(node, ast.Call):
            node = node.func
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and owner is not None:
            return node.value.id == owner
        node = node.value
    return isinstance(node, ast.Name) and owner is None and node.id.startswith("_")


def _owner_name(function: Function) -> str | None:
    if function.is_method and not function.is_static and function.parameters:
        return function.parameters[0]
    return None


def changes_state(function: Function) -> bool:
    owner = _owner_name(function)
    shared = {name for node in ast.walk(function.node) if isinstance(node, ast.Global) for name in node.names}
    aliases = _state_aliases(function, owner)
    for node in statements_of(function.node):
        targets = (
            node.targets if isinstance(node, (ast.Assign, ast.Delete)) else [getattr(node, "target", None)]
        )
        for target in targets:
            if isinstance(target, (ast.Attribute, ast.Subscript)) and _rooted(target, owner, aliases):
                return True
            if isinstance(target, ast.Name) and target.id in shared:
                return True
    return any(
        isinstance(call.func, ast.Attribute)
        and call.func.attr in MUTATORS
        and _rooted(call.func.value, owner, aliases)
        for call in _calls(function)
    )


def _state_aliases(function: Function, owner: str | None) -> frozenset[str]:
    """Locals that name a piece of the pool's state, and parameters: both are state when written into."""
    found = set(_own_parameters(function))
    for node in statements_of(function.node):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            if _own_state(node.value, owner):
                found.add(node.targets[0].id)
        elif isinstance(node, ast.For) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return frozenset(found)


def _rooted(node: ast.AST, owner: str | None, aliases: frozenset[str]) -> bool:
    if _own_state(node, owner):
        return True
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return isinstance(node, ast.Name) and (node.id in aliases or (owner is None and node.id.isupper()))


def _removes_from_state(function: Function) -> bool:
    """Takes something out of the pool: a pop, a queue's get, a free list cut short, a use count raised."""
    owner = _owner_name(function)
    aliases = _state_aliases(function, owner) - frozenset(_own_parameters(function))
    for call in _calls(function):
        if isinstance(call.func, ast.Attribute) and _rooted(call.func.value, owner, aliases):
            empty_get = call.func.attr == "get" and (not call.args or _is_queue(call.func.value))
            if (
                call.func.attr in REMOVERS - {"get"}
                or empty_get
                or take_apart(call.func.attr, ACQUIRE_WORDS - {"get", "pop", "take", "fetch"})
            ):
                return True
    for node in statements_of(function.node):
        match node:
            case ast.Assign(targets=[ast.Attribute() as target], value=ast.Subscript(slice=ast.Slice())):
                if _own_state(target, owner):
                    return True
            case ast.Delete(targets=[ast.Subscript() as target]):
                if _rooted(target, owner, aliases):
                    return True
    return False


def _is_queue(node: ast.expr) -> bool:
    text = ast.unparse(node).lower()
    return "queue" in text


def _kept_under_parameter(function: Function) -> Position | None:
    """The lease stays in the pool's own table under a key that the caller gave: the key is the handle."""
    parameters = _own_parameters(function)
    owner = _owner_name(function)
    derived = {name: index for index, name in enumerate(parameters)}
    for node in ast.walk(function.node):
        if isinstance(node, (ast.For, ast.comprehension)):
            sources = [
                name.id for name in ast.walk(node.iter) if isinstance(name, ast.Name) and name.id in derived
            ]
            if sources:
                derived.update(
                    {
                        name.id: derived[sources[0]]
                        for name in ast.walk(node.target)
                        if isinstance(name, ast.Name)
                    }
                )
    for node in statements_of(function.node):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Attribute(value=ast.Name(id=source))) if (
                source in derived
            ):
                derived[name] = derived[source]
            case ast.Assign(targets=[ast.Attribute() as field]) if _root_name(field) in derived:
                return derived[_root_name(field)]
            case ast.Assign(targets=[ast.Subscript(value=table, slice=key)]) if _own_state(table, owner):
                root = key
                while isinstance(root, ast.Attribute):
                    root = root.value
                if isinstance(root, ast.Name) and root.id in derived:
                    return derived[root.id]
    return None


def _shared_key(function: Function, partners: list[Function]) -> Position | None:
    """`allocate_slots(request, n)` and `free(request)`: what both are given is the handle, the table keeps
    the lease."""
    given = {names[0].rstrip("s") for names in map(_own_parameters, partners) if names}
    for index, name in enumerate(_own_parameters(function)):
        if name.rstrip("s") in given:
            return index
    return None


def _root_name(node: ast.expr) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def value_of(function: Function) -> Value:
    """What the acquire hands out, from its name, its annotation and what its body makes."""
    owner_words = split(function.cls.name) if function.cls is not None else []
    if NUMBERED & {*split(function.name), *owner_words}:
        return Value.INDEX
    returns = getattr(function.node, "returns", None)
    text = ast.unparse(returns) if returns is not None else ""
    owner = _owner_name(function)
    for node in statements_of(function.node):
        match node:
            case ast.Assign(targets=[ast.Attribute() as target], value=ast.Subscript(slice=ast.Slice())):
                if _own_state(target, owner) and "free" in ast.unparse(target):
                    return Value.INDEX
    if "Tensor" in text and "list" not in text.lower() and "tuple" not in text.lower():
        return Value.TENSOR
    if text in ("int", "Optional[int]", "int | None"):
        return Value.INDEX
    if not text and any(name in TENSOR_MAKERS for name in _called(function)):
        return Value.TENSOR
    return Value.OBJECT


def _calls(function: Function) -> list[ast.Call]:
    return [node for node in ast.walk(function.node) if isinstance(node, ast.Call)]


def _called(function: Function) -> set[str]:
    return {
        call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        for call in _calls(function)
    }
