"""Which functions a call may reach, and which operand becomes which parameter."""

import ast
from collections.abc import Iterable

from auditor.flow.effects import Position
from auditor.project.code.annotations import is_container
from auditor.project.code.asked_of import AskedOf, is_called_a_pool, is_called_like, likeness, listing
from auditor.project.code.class_model import ClassModel
from auditor.project.code.modules import Class, Function, last_part
from auditor.protocols.vocabulary import POOLS, split

MAX_CANDIDATES = 4
"""A method name that more classes than this define says nothing about which one is meant."""

COMMON_NAMES = frozenset(
    {"get", "set", "add", "append", "pop", "put", "update", "run", "start", "stop", "close", "open", "read",
    "write", "send",
     "submit", "__init__", "forward", "__call__", "step", "init", "load", "save", "copy", "items",
     "keys", "values", "join", "split", "insert", "remove", "popleft", "appendleft",
     "extend", "clear", "wait", "result", "size", "view", "to", "reset", "flush", "acquire", "release",
     "lock", "apply", "process", "match", "search", "find", "sub", "strip", "replace", "format", "encode",
     "decode"}
)  # fmt: skip


class Calls:
    """Resolves calls; an unknown receiver is tried by method name among the files in play."""

    def __init__(self, model: ClassModel) -> None:
        self.model = model
        self._targets: dict[int, tuple[tuple[Function, ...], Class | None, str | None]] = {}
        self._keep: list[ast.Call] = []
        self._by_name: dict[str, list[Function]] | None = None
        self._asked = AskedOf()

    def index_names(self, functions: Iterable[Function]) -> None:
        """The methods that unresolved receivers may mean."""
        self._by_name = {}
        for function in functions:
            if function.is_method and not function.is_property:
                self._by_name.setdefault(function.name, []).append(function)

    def targets(
        self, function: Function, call: ast.Call
    ) -> tuple[tuple[Function, ...], Class | None, str | None]:
        """(functions it may run, class it constructs, dotted name outside the project)."""
        if id(call) not in self._targets:
            self._keep.append(call)
            self._targets[id(call)] = self._resolve(function, call)
        return self._targets[id(call)]

    def guessed(self, function: Function, call: ast.Call) -> bool:
        """Whether nothing but the method's name tells whom the call may reach."""
        return self.model.callee(function, call.func) is None

    def _resolve(
        self, function: Function, call: ast.Call
    ) -> tuple[tuple[Function, ...], Class | None, str | None]:
        if isinstance(call.func, ast.IfExp):  # `(queue.done if ok else queue.put_back)(item)`
            ways = [ast.Call(func, call.args, call.keywords) for func in (call.func.body, call.func.orelse)]
            reached = [self._resolve(function, way)[0] for way in ways]
            return (tuple(each for found in reached for each in found) if all(reached) else ()), None, None
        found = self.model.callee(function, call.func)
        if isinstance(found, Class):
            init = self.model.method(found, "__init__")
            return ((init,) if init is not None else ()), found, None
        if isinstance(found, Function):
            return self._with_overrides(found), None, None
        if isinstance(found, str):
            return (), None, found
        return self._by_method_name(function, call), None, None

    def _with_overrides(self, found: Function) -> tuple[Function, ...]:
        """An abstract method stands for what its subclasses do."""
        if found.cls is None or not found.is_abstract:
            return (found,)
        overriding = [
            cls.methods[found.name] for cls in self.model.subclasses(found.cls) if found.name in cls.methods
        ] or self._alike(found.cls, found.name)
        return tuple(f for f in overriding if not f.is_abstract)[:8] or (found,)

    def _alike(self, protocol: Class, name: str) -> list[Function]:
        """A typing.Protocol is implemented by whatever class has its methods."""
        bases = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in protocol.node.bases}
        if self._by_name is None or "Protocol" not in bases:
            return []
        return [
            function
            for function in self._by_name.get(name, ())
            if function.cls not in (None, protocol) and protocol.methods.keys() <= function.cls.methods.keys()
        ]

    def _by_method_name(self, function: Function, call: ast.Call) -> tuple[Function, ...]:
        if self._by_name is None or not isinstance(call.func, ast.Attribute):
            return ()
        if is_container(self.model.written(function, call.func.value)):
            return ()  # `self.waiting: deque[Block]`
        if call.func.attr in COMMON_NAMES:
            return self._by_all_that_is_asked(function, call.func.value, call)
        named = [f for f in self._by_name.get(call.func.attr, ()) if not f.is_abstract]
        named = [f for f in named if accepts(f, call)]
        if len(named) > MAX_CANDIDATES:
            return ()
        return most_alike(call.func.value, [f for f in named if not _called_otherwise(call.func.value, f)])

    def _by_all_that_is_asked(
        self, function: Function, receiver: ast.expr, call: ast.Call
    ) -> tuple[Function, ...]:
        """`cache.match(key)` says nothing, but who is asked to `unmatch(node)` as well is a `RadixCache`; who
        is asked for `pool.get()` and `pool.put(link)` any `LinkPool` that has both, as one around another
        has. What is called a pool need not be asked for more than `pool.get()`."""
        named = self._by_name.get(last_part(call.func), ()) if self._by_name is not None else ()
        asked = self._asked.methods(function, receiver) if named else frozenset()
        if len(asked) == 1 and asked <= COMMON_NAMES and isinstance(receiver, ast.Attribute):
            asked = self._asked.in_module(function, receiver)
        alike = len(asked) > 1 or is_called_a_pool(receiver)
        if asked <= COMMON_NAMES and not alike:
            return ()
        fitting = [
            each
            for each in named
            if not each.is_abstract
            and each.cls is not None
            and asked <= self.model.method_names(each.cls)
            and accepts(each, call)
        ]
        if len(fitting) > 1 or asked <= COMMON_NAMES:
            fitting = [each for each in fitting if alike and each.cls and is_called_like(receiver, each.cls)]
        return tuple(fitting) if len(fitting) <= MAX_CANDIDATES else ()


def accepts(function: Function, call: ast.Call) -> bool:
    """Whether the number of arguments can fit."""
    if any(isinstance(arg, ast.Starred) for arg in call.args) or isinstance(function.node, ast.Module):
        return True
    args = function.node.args
    most = len(args.posonlyargs) + len(args.args) - (0 if function.is_static else 1)
    least = most - len(args.defaults)
    given = len(call.args) + len(call.keywords)
    unpacked = any(keyword.arg is None for keyword in call.keywords)
    return (args.vararg is not None or len(call.args) <= most) and (unpacked or given >= least)


def most_alike(receiver: ast.expr, named: list[Function]) -> tuple[Function, ...]:
    """Of methods of one name those whose classes share most words with the receiver's name, besides that it
    is a pool: `self.host_pool.alloc()` is of the `HostPool`."""
    name = last_part(listing(receiver))
    shared = [likeness(name, each.cls.name) if each.cls is not None else 0 for each in named]
    return tuple(each for each, count in zip(named, shared, strict=True) if count == max(shared))


def _called_otherwise(receiver: ast.expr, function: Function) -> bool:
    """`buffer_pool.allocate()` is no method of a class `Handles`, even where no other class has one."""
    name = last_part(receiver)
    said = [word for word in split(name) if word not in ("self", "my", "the")]
    if len(said) < 2 or said[-1] not in POOLS or function.cls is None:
        return False  # what is called just `pool` may be of any class
    return set(said).isdisjoint(split(function.cls.name))


def parameter_for(function: Function, position: Position, bound: bool) -> str | None:
    """The parameter that receives the operand; None where it disappears into *args or **kwargs, or does not
    fit."""
    if isinstance(function.node, ast.Module):
        return None
    args = function.node.args
    positional = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    if isinstance(position, str):
        named = [*positional, *(arg.arg for arg in args.kwonlyargs)]
        return position if position in named else None
    index = position + 1 if bound else position
    if 0 <= index < len(positional):
        return positional[index]
    return None


def is_bound(function: Function, call: ast.Call) -> bool:
    """Whether the call passes the receiver as first parameter without writing it."""
    if _through_its_class(function, call):
        return False
    if function.name == "__init__":
        return True
    return (
        function.is_method
        and not function.is_static
        and isinstance(call.func, (ast.Attribute, ast.Name, ast.IfExp))
    )


def _through_its_class(function: Function, call: ast.Call) -> bool:
    """`Base.__init__(self, pool)`: the object is written as the first argument."""
    if (
        not isinstance(call.func, ast.Attribute)
        or function.cls is None
        or "classmethod" in function.decorators
    ):
        return False
    owner = call.func.value
    named = last_part(owner)
    first = call.args[0] if call.args else None
    hands_itself = isinstance(first, ast.Name) and first.id in ("self", "this")
    return named == function.cls.name or (hands_itself and named[:1].isupper())


def constants_passed(function: Function, call: ast.Call, bound: bool) -> frozenset[tuple[str, object]]:
    """Parameters that this call sets to True, False or None, by writing it or by the default."""
    if isinstance(function.node, ast.Module):
        return frozenset()
    args = function.node.args
    positional = [*args.posonlyargs, *args.args]
    values: dict[str, ast.expr | None] = {}
    for arg, default in zip(reversed(positional), reversed(args.defaults), strict=False):
        values[arg.arg] = default
    for arg, kw_default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        values[arg.arg] = kw_default
    if any(isinstance(arg, ast.Starred) for arg in call.args) or any(
        keyword.arg is None for keyword in call.keywords
    ):
        return frozenset()
    for index, expression in enumerate(call.args):
        name = parameter_for(function, index, bound)
        if name is not None:
            values[name] = expression
    values.update({keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None})
    return frozenset(
        (name, node.value)
        for name, node in values.items()
        if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool))
    )
