"""What a pool's methods do to the pool: whether they change its state, take something out of it."""

import ast
from collections.abc import Iterator, Sequence, Set

from auditor.project.code.bindings import given_to_field
from auditor.project.code.modules import Function, last_part
from auditor.protocols.vocabulary import ACQUIRE_WORDS, take_apart

REMOVERS = frozenset(
    {"pop", "popleft", "popitem", "get", "get_nowait", "remove", "discard", "popleft_n", "pop_n"}
)
MUTATORS = REMOVERS - {"get"} | frozenset(
    {"append", "appendleft", "add", "insert", "extend", "update", "put", "put_nowait", "setdefault", "clear",
     "difference_update", "fill_", "append_n", "extendleft", "copy_"}
)  # fmt: skip
ORDERING = frozenset({"heappop", "heappush", "heappushpop", "heapreplace", "heapify", "insort", "insort_left",
                      "insort_right"})  # fmt: skip
"""Functions that change the list which they are given first."""


PATIENCE = frozenset({"timeout", "timeout_s", "timeout_ms", "blocking", "wait", "deadline"})
"""Last parameters that name nothing."""


def own_parameters(function: Function) -> tuple[str, ...]:
    """Without `self`, and without what says how long it may take; of `put(self, *slots)` the slots."""
    names = function.parameters
    own = names[1:] if function.of_first or (function.is_method and not function.is_static) else names
    while own and own[-1] in PATIENCE:
        own = own[:-1]
    return own or _gathered(function)


def _gathered(function: Function) -> tuple[str, ...]:
    """`*args` are another function's."""
    args = function.node.args if isinstance(function.node, ast.FunctionDef | ast.AsyncFunctionDef) else None
    gathered = args.vararg.arg if args is not None and args.vararg is not None else "args"
    return () if gathered.lstrip("_") in ("", "args") else (gathered,)


def own_state(node: ast.AST, owner: str | None) -> bool:
    """An attribute of self, or a module's global, at the root of an expression. What a function is told first
    may be the container itself."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        if isinstance(node, ast.Call):
            if owner is not None and _is_type_of(node, owner):
                return True  # what the class has is the object's as well
            node = node.func
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and owner is not None:
            return node.value.id == owner
        node = node.value
    return isinstance(node, ast.Name) and owner is None and node.id.startswith("_")


def _is_type_of(call: ast.Call, owner: str) -> bool:
    """`type(self)`."""
    match call:
        case ast.Call(func=ast.Name(id="type"), args=[ast.Name(id=name)], keywords=[]):
            return name == owner
    return False


def changes_state(function: Function) -> bool:
    """It assigns to, or fills and empties, what belongs to the pool."""
    owner = function.owner
    shared = {name for node in function.of_kind(ast.Global) for name in node.names}
    aliases = _state_aliases(function, owner, own_parameters(function))
    for node in function.statements:
        targets = (
            node.targets if isinstance(node, (ast.Assign, ast.Delete)) else [getattr(node, "target", None)]
        )
        for target in _each(targets):
            if isinstance(target, (ast.Attribute, ast.Subscript)) and _rooted(target, owner, aliases):
                return True
            if isinstance(target, ast.Name) and target.id in shared:
                return True
    return any(
        changed is not None and _rooted(changed, owner, aliases)
        for changed in (_changed(call, MUTATORS) for call in function.of_kind(ast.Call))
    )


def _each(targets: Sequence[ast.expr | None]) -> Iterator[ast.expr]:
    """`got, self.free = ...` assigns to both."""
    for target in targets:
        if isinstance(target, (ast.Tuple, ast.List)):
            yield from _each(target.elts)
        elif target is not None:
            yield target


def _changed(call: ast.Call, methods: Set[str]) -> ast.expr | None:
    """The container that a call changes: `self.free.append(block)`, `heapq.heappush(self.free, block)`."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in ORDERING:
        return call.args[0] if call.args else None
    return call.func.value if isinstance(call.func, ast.Attribute) and name in methods else None


def _state_aliases(function: Function, owner: str | None, told: Sequence[str] = ()) -> frozenset[str]:
    """Locals that name a piece of the pool's state; and what it is told, and where that leads, is state, too,
    when written into."""
    found = set(told)
    for node in function.statements:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ) if own_state(value, owner) or _leads_from(value, found):
                found.add(name)
        if isinstance(node, ast.For):
            found.update(each.id for each in _each([node.target]) if isinstance(each, ast.Name))
    return frozenset(found)


def _leads_from(value: ast.expr, names: Set[str]) -> bool:
    """`cursor = node`, `parent = cursor.parent`"""
    while isinstance(value, ast.Attribute):
        value = value.value
    return isinstance(value, ast.Name) and value.id in names


def _rooted(node: ast.AST, owner: str | None, aliases: frozenset[str]) -> bool:
    if own_state(node, owner):
        return True
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return isinstance(node, ast.Name) and (node.id in aliases or (owner is None and node.id.isupper()))


def removes_from_state(function: Function) -> bool:
    """Takes something out of the pool: a pop, a queue's get, a free list cut short, a use count raised."""
    owner = function.owner
    aliases = _state_aliases(function, owner) - frozenset(own_parameters(function))
    for call in function.of_kind(ast.Call):
        changed = _changed(call, frozenset())
        if changed is not None and _rooted(changed, owner, aliases):
            return True
        if isinstance(call.func, ast.Attribute) and _rooted(call.func.value, owner, aliases):
            empty_get = call.func.attr == "get" and (not call.args or is_queue(function, call.func.value))
            if (
                call.func.attr in REMOVERS - {"get"}
                or empty_get
                or take_apart(call.func.attr, ACQUIRE_WORDS - {"get", "pop", "take", "fetch"})
            ):
                return True
    for node in function.statements:
        match node:
            case ast.Assign(targets=[target], value=value) if cut_short(target, value, owner):
                return True
            case ast.Delete(targets=[ast.Subscript() as target]):
                if _rooted(target, owner, aliases):
                    return True
    return False


def cut_short(target: ast.expr, value: ast.expr, owner: str | None) -> bool:
    """`self.free = self.free[n:]`, alone or beside what is taken."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return any(cut_short(*pair, owner) for pair in zip(target.elts, value.elts, strict=False))
    sliced = isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Slice)
    return isinstance(target, ast.Attribute) and sliced and own_state(target, owner)


def is_queue(function: Function, node: ast.expr) -> bool:
    """By its name, or as the class or the module makes it: `self._q = queue.LifoQueue()`. Who gets from one
    removes."""
    text = ast.unparse(node)
    if "queue" in text.lower():
        return True
    if isinstance(node, ast.Name):
        made = function.module.assigned.get(node.id) if function.cls is None else None
        return isinstance(made, ast.Call) and last_part(made.func).endswith("Queue")
    methods = function.cls.methods.values() if function.cls is not None else ()
    return isinstance(node, ast.Attribute) and any(
        isinstance(value, ast.Call) and last_part(value.func).endswith("Queue")
        for method in methods
        for value in given_to_field(method, node.attr)
    )


def called(function: Function) -> set[str]:
    """Last names of everything that it calls."""
    return {
        call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        for call in function.of_kind(ast.Call)
    }
