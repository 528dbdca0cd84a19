"""What a pool's methods hand out, and how: under which key, of what kind, from what other pool."""

import ast
import re
from collections.abc import Sequence

from auditor.flow.effects import Position
from auditor.ir.calls import is_quiet
from auditor.project.code.bindings import given_to, root_of, ways
from auditor.project.code.modules import Function, last_part
from auditor.project.shapes.pool_state import own_parameters, own_state
from auditor.protocols.vocabulary import ACQUIRE_WORDS, POOLS, WEAK, singular, split, take_apart
from auditor.source.nodes import walk

TELLING = frozenset({"add_done_callback", "add_callback", "link", "call_later", "call_at", "finalize"})
"""Who is told by them is asked once the thing is over, or its time is."""

SIMPLE = frozenset({"", "None", "bool", "int", "str", "float", "Any", "object"})
"""Annotations that tell no handle from another."""


def told_nothing(function: Function) -> bool:
    """It takes no parameters, or none but switches such as `force=False`."""
    args = getattr(function.node, "args", None)
    if not isinstance(args, ast.arguments):
        return False
    positional = [*args.posonlyargs, *args.args]
    defaults = dict(zip((each.arg for each in reversed(positional)), reversed(args.defaults), strict=False))
    defaults |= {
        each.arg: default for each, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if default
    }
    named = {each.arg: each.annotation for each in (*positional, *args.kwonlyargs)}
    told = [*own_parameters(function), *(each.arg for each in args.kwonlyargs)]
    return all(_is_switch(defaults.get(name), named.get(name)) for name in told)


def _is_switch(default: ast.expr | None, annotation: ast.expr | None) -> bool:
    """`force=False`, and `force: bool` without one."""
    if default is not None:
        return isinstance(default, ast.Constant) and isinstance(default.value, bool)
    return isinstance(annotation, ast.Name) and annotation.id == "bool"


def ends_when_it_is_done(function: Function, partners: Sequence[Function]) -> bool:
    """`task.add_done_callback(partial(self._reap, log))`: it tells the end itself that it is over."""
    names = {partner.name for partner in partners}
    told = (arg for call in function.calls if last_part(call.func) in TELLING for arg in call.args)
    return any(isinstance(node, ast.Attribute) and node.attr in names for arg in told for node in walk(arg))


def fronts_a_pool(function: Function) -> bool:
    """`tensor = self._memory_pool.allocate(...)` and `return tensor`: it hands on what another lends."""
    asking = {id(call) for call in function.calls if _asks_a_pool(call.func)}
    if not asking:
        return False
    statements = list(function.statements)
    lent = {
        target.id
        for each in statements
        if isinstance(each, ast.Assign) and id(each.value) in asking
        for target in each.targets
        if isinstance(target, ast.Name)
    }
    returned = [each.value for each in statements if isinstance(each, ast.Return)]
    return any(id(each) in asking or (isinstance(each, ast.Name) and each.id in lent) for each in returned)


def _asks_a_pool(callee: ast.expr) -> bool:
    match callee:
        case ast.Attribute(value=ast.Attribute(attr=owner) | ast.Name(id=owner), attr=method):
            name = take_apart(method, ACQUIRE_WORDS - WEAK)
            return name is not None and not POOLS.isdisjoint(split(owner)[-1:])
    return False


def returns_something(function: Function) -> bool:
    """Some return hands out a value that is neither None nor a plain yes or no."""
    if ast.unparse(getattr(function.node, "returns", None) or ast.Constant("")) in ("bool", "None"):
        return False
    for node in function.statements:
        if isinstance(node, ast.Return) and not isinstance(
            node.value, (ast.Constant, ast.Compare, type(None))
        ):
            return True
    return False


def lends(function: Function, partners: list[Function]) -> bool:
    """`pin()` is told of no object and returns one, which `unpin(page)` is told of: that is no mark. Nor is
    `inc_ref(name)`, which returns a handle for `dec_ref(handle)`."""
    if not returns_something(function) or returns_itself(function) or not all(map(own_parameters, partners)):
        return False
    told = own_parameters(function)
    itself = given_back_itself(function, partners) or _returns_what_it_is_told(function, partners)
    itself = itself or _returns_a_record_of_it(function, partners)
    return bool(partners) and (not told or itself)


def _returns_a_record_of_it(function: Function, partners: list[Function]) -> bool:
    """`lock(key)` returns `Grant(key, owner)`, and `unlock(grant)` reads `grant.key`."""
    told = own_parameters(function)
    returned = (node.value for node in function.statements if isinstance(node, ast.Return))
    made = any(
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Name)
        and value.func.id.lstrip("_")[:1].isupper()
        and any(isinstance(each, ast.Name) and each.id in told for each in value.args)
        for value in returned
    )
    return made and all(
        isinstance(node, ast.Attribute)
        for partner in partners
        for name in own_parameters(partner)[:1]
        for node in _readings(partner, name)
    )


def _readings(function: Function, name: str) -> list[ast.AST]:
    """`grant.key` where that is all that is asked of it, else the name itself."""
    fields = {id(node.value): node for node in function.nodes if isinstance(node, ast.Attribute)}
    named = [node for node in function.of_kind(ast.Name) if node.id == name]
    return [fields.get(id(node), node) for node in named]


def _returns_what_it_is_told(function: Function, partners: list[Function]) -> bool:
    """`lock_path(path)` returns the path, cleaned, and `unlock_path(token)` is told of a token."""
    told = set(own_parameters(function))
    if any(told & set(own_parameters(partner)[:1]) for partner in partners):
        return False
    returned = (node.value for node in function.statements if isinstance(node, ast.Return))
    return any(isinstance(value, ast.Name) and value.id in told for value in returned)


def returns_itself(function: Function) -> bool:
    """`return self` of `lock()`: the object is marked, and handed on for a chain of calls."""
    own = function.owner
    returned = (node.value for node in function.statements if isinstance(node, ast.Return))
    return any(isinstance(value, ast.Name) and value.id == own for value in returned)


def kept_under_parameter(function: Function) -> Position | None:
    """The lease stays in the pool's own table under a key that the caller gave: the key is the handle."""
    parameters = own_parameters(function)
    owner = function.owner
    derived = {name: index for index, name in enumerate(parameters)}
    for node in function.nodes:
        if isinstance(node, (ast.For, ast.comprehension)) and not _is_numbers(node.iter):
            sources = [
                name.id for name in walk(node.iter) if isinstance(name, ast.Name) and name.id in derived
            ]
            if sources:
                derived.update(
                    {name.id: derived[sources[0]] for name in walk(node.target) if isinstance(name, ast.Name)}
                )
    for node in function.statements:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Attribute(value=ast.Name(id=source))) if (
                source in derived
            ):
                derived[name] = derived[source]
            case ast.Assign(targets=[ast.Attribute() as field]) if root_of(field) in derived:
                return derived[root_of(field)]
            case ast.Assign(targets=[ast.Subscript(value=table, slice=key)]) if own_state(table, owner):
                root = key
                while isinstance(root, ast.Attribute):
                    root = root.value
                if isinstance(root, ast.Name) and root.id in derived:
                    return derived[root.id]
    return None


def _is_numbers(over: ast.expr) -> bool:
    """`range(first, first + n)`: places, of which it was told how many."""
    return isinstance(over, ast.Call) and last_part(over.func) == "range"


def shared_key(function: Function, partners: list[Function]) -> Position | None:
    """`allocate_slots(request, n)` and `free(request)`: what both are given is the handle, the table keeps
    the lease."""
    given = {names[0].rstrip("s") for names in map(own_parameters, partners) if names}
    for index, name in enumerate(own_parameters(function)):
        if name.rstrip("s") in given:
            return index
    return None


def given_back_itself(function: Function, partners: list[Function]) -> bool:
    """`acquire_server(request_id)` returns `server_id`, and `release_server(server_id)` is told that: what is
    returned is the handle, whatever table it stands in meanwhile."""
    if _hands_out_popped(function) and any(puts_another(partner, function) for partner in partners):
        return True
    if any(_told_the_same(partner, function) for partner in partners):
        return False
    given = [parameter for partner in partners if (parameter := not_shared(partner, function)) is not None]
    told = {name for name, _ in given}
    for node in function.statements:
        if isinstance(node, ast.Return) and node.value is not None:
            parts = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            if any(last_part(part) in told for part in parts):
                return True
    returns = getattr(function.node, "returns", None)
    kind = ast.unparse(returns).removesuffix(" | None") if returns is not None else ""
    kind = kind[len("Optional[") : -1] if kind.startswith("Optional[") else kind
    return kind not in SIMPLE and any(kind == annotation for _, annotation in given)


def returns_several(function: Function) -> bool:
    """`return self.acquire(), self.acquire()`: each of them is a lease, and its callers owe them apart."""
    returned = (node.value for node in function.statements if isinstance(node, ast.Return))
    tuples = [value.elts for value in returned if isinstance(value, ast.Tuple)]
    return bool(tuples) and all(
        len(parts) > 1 and all(_asks_itself(function, part) for part in parts) for parts in tuples
    )


def returns_tuples(function: Function) -> bool:
    """Nothing else, but for None."""
    returned = [node.value for node in function.statements if isinstance(node, ast.Return) and node.value]
    told = [value for value in returned if not isinstance(value, ast.Constant)]
    return bool(told) and all(isinstance(value, ast.Tuple) for value in told)


def _asks_itself(function: Function, part: ast.expr) -> bool:
    """`self.acquire()`, or a name for that."""
    match part:
        case ast.Name(id=name):
            given = list(given_to(function, name))
            return bool(given) and all(
                isinstance(each, ast.Call) and _asks_itself(function, each) for each in given
            )
        case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=method)):
            return owner == function.owner and take_apart(method, ACQUIRE_WORDS) is not None
    return False


def _hands_out_popped(function: Function) -> bool:
    """`return idle.pop()`, or that under a name."""
    returned = [node.value for node in function.statements if isinstance(node, ast.Return)]
    named = (
        value for each in returned if isinstance(each, ast.Name) for value in given_to(function, each.id)
    )
    return any(
        isinstance(value, ast.Call)
        and last_part(value.func) in ("pop", "popleft", "get_nowait")
        and all(isinstance(each, ast.Constant) for each in value.args)
        for each in (*returned, *named)
        if each is not None
        for value in ways(each)
    )


def puts_another(partner: Function, function: Function) -> bool:
    """`checkin(url, session)` of what `checkout(url)` has found: the url says only where it lies."""
    other = not_shared(partner, function)
    return other is not None and any(
        last_part(call.func) in ("append", "appendleft", "put", "put_nowait")
        and any(isinstance(each, ast.Name) and each.id == other[0] for each in call.args)
        for call in partner.calls
    )


def piles_up_what_it_is_told(partner: Function) -> bool:
    """`self._free[t.shape].append(t)`: what it takes back is the thing itself, and no key."""
    told = own_parameters(partner)[:1]
    return any(
        last_part(call.func) in ("append", "appendleft", "put", "put_nowait")
        and any(getattr(each, "id", None) in told for each in call.args)
        for call in partner.calls
    )


def hands_out_what_ends(begins: Function, ends: Function) -> bool:
    """`charge(tenant, tokens)` returns what `refund(receipt)` is told."""
    return bool(own_parameters(ends)) and returns_something(begins) and not _told_the_same(ends, begins)


def _told_the_same(partner: Function, function: Function) -> bool:
    """`alloc(reqs)` and `free(req)`, `take(rid)` and `release(rid)`, whatever else takes back rows."""
    own, asked = ({singular(name) for name in own_parameters(each)} for each in (partner, function))
    return bool(own) and own <= asked


def not_shared(partner: Function, function: Function) -> tuple[str, str] | None:
    """The first or second parameter of `put(address, link)` that `get(address)` does not have, with its
    annotation."""
    own, shared = own_parameters(partner)[:2], set(own_parameters(function))
    args = getattr(partner.node, "args", None)
    for arg in args.args if isinstance(args, ast.arguments) else ():
        if arg.arg in own and arg.arg not in shared:
            return arg.arg, ast.unparse(arg.annotation) if arg.annotation else ""
    return None


def keeps_what_it_is_told(function: Function) -> bool:
    """`self._kept.append(value)`, of a parameter."""
    given = set(own_parameters(function))
    return any(
        isinstance(call.func, ast.Attribute)
        and call.func.attr in ("append", "add", "appendleft", "extend")
        and any(isinstance(arg, ast.Name) and arg.id in given for arg in call.args)
        for call in function.calls
    )


HARMLESS = re.compile(
    r"(?:time\.)?(?:time|monotonic|perf_counter)(?:_ns)?|list|dict|set|tuple"
    r"|(?:collections\.)?(?:deque|defaultdict|OrderedDict)|(?:itertools\.)?count"
    r"|(?:threading|asyncio)\.(?:R?Lock|Event|Condition)"
)
"""Calls of which nobody expects that they fail."""


def only_notes(constructor: Function) -> bool:
    """`self.sock = sock`, `self.born = time.monotonic()`: there is nothing in it that could go wrong."""
    plain = all(
        isinstance(node, ast.Assign | ast.AnnAssign | ast.Pass)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in constructor.statements
    )
    looks_up = any(isinstance(node, ast.Subscript) for node in constructor.nodes)
    calls = (ast.unparse(call.func) for call in constructor.calls)
    return plain and not looks_up and all(HARMLESS.fullmatch(each) for each in calls)


def contains_failures(function: Function) -> bool:
    """`try: ... except: return None` is all it does that could fail: logging cannot.

    A body that calls nothing at all stands for others: who handles its failures has seen one that fails.
    """
    body = function.body
    if not isinstance(body, list):
        return _harmless(body)  # a lambda's
    works = any(isinstance(node, (ast.Call, ast.Try)) for each in body for node in walk(each))
    return works and all(_contained(each) for each in body)


def _contained(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Try) and any(_catches_all(handler) for handler in statement.handlers):
        rest = [*statement.orelse, *statement.finalbody]
        return all(_harmless(inner) for handler in statement.handlers for inner in handler.body) and all(
            _contained(inner) for inner in rest
        )
    return _harmless(statement)


def _catches_all(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or getattr(handler.type, "id", "") in ("Exception", "BaseException")


def _harmless(statement: ast.AST) -> bool:
    risky = (ast.Subscript, ast.Await, ast.Raise, ast.With, ast.AsyncWith, ast.Import)
    return not any(
        isinstance(inner, risky) or (isinstance(inner, ast.Call) and not is_quiet(inner))
        for inner in walk(statement)
    )
