"""What a pool's methods do to the pool: whether they change its state, take out of it, keep under a key."""

import ast

from auditor.flow.effects import Position, Value
from auditor.project.bindings import statements_of
from auditor.project.modules import Function
from auditor.protocols.vocabulary import ACQUIRE_WORDS, split, take_apart

REMOVERS = frozenset(
    {"pop", "popleft", "popitem", "get", "get_nowait", "remove", "discard", "popleft_n", "pop_n"}
)
NUMBERED = frozenset({"slot", "slots", "block", "blocks", "page", "pages", "index", "indices", "row",
                      "rows", "kv", "token",
                      "tokens", "blocked", "kvcache", "req", "id", "ids", "seq", "chunk", "chunks", "slab",
                      "descriptor"})  # fmt: skip
"""Of these a pool hands out numbers, or objects that stand for numbers: copies of the number carry the
obligation."""

MUTATORS = REMOVERS - {"get"} | frozenset(
    {"append", "appendleft", "add", "insert", "extend", "update", "put", "put_nowait", "setdefault", "clear",
     "difference_update", "fill_", "append_n", "extendleft", "copy_"}
)  # fmt: skip
NUMBERS = frozenset(
    pattern.format(kind)
    for kind in ("int", "list[int]", "List[int]", "set[int]", "tuple[int, ...]")
    for pattern in ("{}", "Optional[{}]", "{} | None")
)
"""Annotations that say that only numbers are handed out."""

TENSOR_MAKERS = frozenset({"empty", "zeros", "ones", "full", "empty_like", "zeros_like", "empty_strided",
                           "new_empty",
                           "new_zeros", "as_strided", "frombuffer"})  # fmt: skip


def own_parameters(function: Function) -> tuple[str, ...]:
    """Without `self`."""
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
    """It assigns to, or fills and empties, what belongs to the pool."""
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
    found = set(own_parameters(function))
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


def removes_from_state(function: Function) -> bool:
    """Takes something out of the pool: a pop, a queue's get, a free list cut short, a use count raised."""
    owner = _owner_name(function)
    aliases = _state_aliases(function, owner) - frozenset(own_parameters(function))
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


def kept_under_parameter(function: Function) -> Position | None:
    """The lease stays in the pool's own table under a key that the caller gave: the key is the handle."""
    parameters = own_parameters(function)
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


def shared_key(function: Function, partners: list[Function]) -> Position | None:
    """`allocate_slots(request, n)` and `free(request)`: what both are given is the handle, the table keeps
    the lease."""
    given = {names[0].rstrip("s") for names in map(own_parameters, partners) if names}
    for index, name in enumerate(own_parameters(function)):
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
    if text in NUMBERS:
        return Value.INDEX
    if not text and any(name in TENSOR_MAKERS for name in called(function)):
        return Value.TENSOR
    return Value.OBJECT


def _calls(function: Function) -> list[ast.Call]:
    return [node for node in ast.walk(function.node) if isinstance(node, ast.Call)]


def called(function: Function) -> set[str]:
    """Last names of everything that it calls."""
    return {
        call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        for call in _calls(function)
    }
