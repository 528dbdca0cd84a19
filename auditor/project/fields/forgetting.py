"""Methods that throw away what a field holds, by their names and by what else they call."""

import ast
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Set

from auditor.project.code.bindings import (
    assigned_by,
    assignments,
    given_to,
    gone_through,
    own_attribute,
    root_of,
)
from auditor.project.code.calls import accepts
from auditor.project.code.modules import Function
from auditor.project.code.project import Project
from auditor.project.code.release_names import looks_releasing
from auditor.project.code.scripts import is_of_another_class
from auditor.project.fields.worked_with import works_with_its_entry
from auditor.project.meaning.sites import last_name
from auditor.protocols.vocabulary import split
from auditor.source.nodes import walk

CLEANUP = re.compile(
    r"_*(?:close|shutdown|stop|clean_?up\w*|release\w*|free\w*|deallocate\w*|dispose\w*|destroy\w*|teardown\w*|finish\w*|reset\w*|clear\w*"
    r"|flush\w*|end\w*|exit|__exit__|__aexit__|__del__|del)_*"
)
CLOSING = re.compile(
    r"_*(?:close|shutdown|stop|clean_?up|dispose|destroy|tear_?down|terminate|disconnect|finish|abort|__a?exit__)_*"
)
"""Those of them after which nobody looks at the field again."""

DISCARDING = re.compile(r"_*(?:discard|cancel|roll_?back|reset|clear|purge|drop|clean)(?:_all|_up)?_*")
"""Those that throw away all that there is, when nobody is told which."""

RESETTING = re.compile(r"(?:reset|clear|restart|reinit\w*|start_over)(?:_(?:state|all))?")
"""Those after which it goes on from the beginning."""

PARTING = frozenset(
    {
        "detach",
        "disown",
        "steal",
        "abandon",
        "fork",
        "forked",
        "lost",
        "transfer",
        "move",
        "forget",
        "invalidate",
        "unlink",
    }
)
"""Words of methods after which it is somebody else's, or nobody's."""

HANDING_ON = PARTING - {"forget", "lost", "abandon", "invalidate", "unlink"}
"""Those after which it surely is somebody else's."""

INITIAL = frozenset(
    {"__init__", "__post_init__", "__new__", "__enter__", "__aenter__", "setup", "reset_parameters"}
)


def forgets(method: Function, attribute: str, ends: Set[str] = frozenset()) -> bool:
    """A method that others call, and that gives nothing back itself: what it throws away is thrown away.

    Unless it starts everything anew, the pool with the table, or is told what it throws out.
    """
    if works_with_its_entry(method, attribute, ends):
        return False
    if method.name.startswith("_") or method.name in INITIAL or not CLEANUP.fullmatch(method.name):
        return not method.name.startswith("_") and _takes_out(method, attribute)
    own = [call for call in method.calls if not _is_of_its_base(call, method)]
    return not any(looks_releasing(call) or _renews_another(call, attribute) for call in own)


def _is_of_its_base(call: ast.Call, method: Function) -> bool:
    """`super().close()` in `close`: what that gives back are the base's own fields."""
    match call.func:
        case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=name):
            return name == method.name
    return False


def _takes_out(method: Function, attribute: str) -> bool:
    """`self.table.pop(key)`, `del self.table[key]` in a method that releases nothing, or what it has from
    another field."""
    if not releases_others_only(method, attribute) or method.name in INITIAL:
        return False
    return not any(
        isinstance(node, ast.Attribute) and node.attr == attribute and isinstance(node.ctx, ast.Store)
        for node in method.nodes
    )


LOCK = re.compile(r"lock|mutex|gate|sem(?:aphore)?\b|latch|cond|(?:^|_)cv$")
"""Names of what holds nothing but its own state."""


def releases_others_only(method: Function, attribute: str, looped: bool = False) -> bool:
    return all_from_others(filter(looks_releasing, method.calls), method, attribute, looped)


def all_from_others(
    releases: Iterable[ast.Call], method: Function, attribute: str, looped: bool = False
) -> bool:
    return all(_from_another(call, method, attribute, looped) for call in releases)


def is_from_another_field(call: ast.Call, function: Function, table: str) -> bool:
    """`self.rows.free(self.staged)`, which gives back nothing that lay in the table."""
    return bool(call.args) and _from_another(call, function, table, looped=False)


def _from_another(call: ast.Call, method: Function, attribute: str, looped: bool) -> bool:
    """`slot = self.running.pop(key)`, and `self.slots.release(slot)`: that is not what is in this field. Nor
    is `for slot in self.running.pop(key):`, if loops are asked, nor `self.gate.release()` of a lock."""
    own = method.owner
    if not call.args and isinstance(call.func, ast.Attribute):
        held = own_attribute(call.func.value, own or "")
        return held is not None and held != attribute and LOCK.search(held) is not None
    for argument in call.args:
        if _is_of_new_ones(argument, method):
            continue
        named = list(_given_to_its_name(method, argument)) if root_of(argument) else []
        given = named if named or isinstance(argument, ast.Name) else [argument]
        given += gone_through(method, argument.id) if looped and isinstance(argument, ast.Name) else []
        fields = {
            inner.attr
            for value in given
            for inner in walk(value)
            if isinstance(inner, ast.Attribute) and getattr(inner.value, "id", None) == own
        }
        if not fields or attribute in fields or any(_asks_its_object(value, own) for value in named):
            return False
    return bool(call.args)


def _asks_its_object(value: ast.expr, own: str | None) -> bool:
    """`order = self.peek()`, who knows out of what."""
    return any(
        isinstance(node, ast.Call) and own_attribute(node.func, own or "") is not None for node in walk(value)
    )


def _given_to_its_name(method: Function, argument: ast.expr) -> Iterator[ast.expr]:
    """`self.rows.pop(key)` of `slot`, where `slot, _ = self.rows.pop(key)`, and of `row[0]`."""
    name = root_of(argument)
    if name == method.owner:
        return
    for target, value in assignments(method):
        parts = target.elts if isinstance(target, ast.Tuple) else [target]
        if any(isinstance(part, ast.Name) and part.id == name for part in parts):
            yield value


def _is_of_new_ones(given: ast.expr, method: Function) -> bool:
    """`for each in fresh: give(each)` and `give(fresh.pop())`, of a local list that was filled with what
    calls in here lent."""
    match given:
        case ast.Name(id=name):
            over = list(gone_through(method, name))
            if any(given_to(method, name)):
                return False
        case ast.Call(func=ast.Attribute(value=ast.Name() as taken_from, attr="pop")):
            over = [taken_from]
        case _:
            return False
    lists = {each.id for each in over if isinstance(each, ast.Name)}
    if len(lists) != 1 or len(lists) < len(over):
        return False
    begun = list(given_to(method, *lists))
    put = [
        call.args[0]
        for call in method.calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr == "append"
        and getattr(call.func.value, "id", None) in lists
    ]
    return bool(put) and all(isinstance(each, ast.List) and not each.elts for each in begun) and all(
        isinstance(each, ast.Call)
        or (isinstance(each, ast.Name) and all(isinstance(v, ast.Call) for v in given_to(method, each.id)))
        for each in put
    )  # fmt: skip


def emptying(method: Function, attribute: str) -> set[int]:
    """Lines of `self.lease = None`, `self.lease = other.lease`, in a method that others call, which are not
    about what has failed or has gone elsewhere."""
    own = method.owner
    if own is None or method.name.startswith("_"):
        return set()
    parting = not PARTING.isdisjoint(split(method.name))
    failed = {id(n) for each in method.nodes if isinstance(each, ast.ExceptHandler) for n in walk(each)}
    return {
        node.lineno
        for node in method.statements
        for target, value in assigned_by(node)
        if id(node) not in failed and own_attribute(target, own) == attribute
        if (_is_nothing(value) and not parting) or _is_of_another(value, own, attribute)
    }


def _is_of_another(value: ast.expr, own: str, attribute: str) -> bool:
    match value:
        case ast.Attribute(value=ast.Name(id=other), attr=attr):
            return other != own and attr == attribute
    return False


def _is_nothing(value: ast.expr) -> bool:
    match value:
        case ast.Constant(value=None) | ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=1)):
            return True
    return False


def gives_back_by_name(function: Function) -> bool:
    return any(map(looks_releasing, function.calls))


def for_good(
    project: Project, method: Function, gives_back: Callable[[Function], bool] = gives_back_by_name
) -> bool:
    """Nobody who gives things back calls the method to strike them off a table afterwards."""
    name = method.name
    return not any(
        last_name(call) == name
        and accepts(method, call)
        and not _is_of_an_entry(method, function, call)
        and not is_of_another_class(function, call, method)
        and gives_back(function)
        for module in project.parsed()
        if f"{name}(" in module.text
        for function in module.by_node.values()
        for call in function.calls
    )


def _is_of_an_entry(method: Function, function: Function, call: ast.Call) -> bool:
    """`job.graph.reset()` in the class whose own `reset()` is asked about."""
    match call.func:
        case ast.Attribute(value=ast.Attribute(value=ast.Name(id=root))):
            return function.cls is not None and function.cls is method.cls and root != function.owner
    return False


def starts_anew(
    method: Function, attribute: str, pools: set[str], of_entries: Collection[ast.Call] = ()
) -> bool:
    """The pool with the table: `self.pool = Pool()`, `self.pool.reset()`, not what is done to entries."""
    own = method.owner or ""
    made = {own_attribute(target, own) for target, _ in assignments(method)}
    others = (call for call in method.calls if call not in of_entries)
    return not pools.isdisjoint(made) or any(_renews_another(call, attribute) for call in others)


def _renews_another(call: ast.Call, attribute: str) -> bool:
    if last_name(call) not in ("clear", "reset", "reset_state", "__init__") or not isinstance(
        call.func, ast.Attribute
    ):
        return False
    owner = call.func.value
    return isinstance(owner, ast.Attribute) and owner.attr != attribute


def escaped_by_name(method: Function, attribute: str | None = None) -> bool:
    """`getattr(self, name)` reaches every field, in a method that releases something, or hands it on; with
    names that a loop spells out, those alone."""
    own = method.owner
    calls = list(method.calls)
    dynamic = [
        call
        for call in calls
        if last_name(call) in ("getattr", "vars")
        and call.args
        and isinstance(call.args[0], ast.Name)
        and call.args[0].id == own
        and not (len(call.args) > 1 and isinstance(call.args[1], ast.Constant))
    ]
    spelt = [_spelt_out(method, call) for call in dynamic]
    others = attribute is not None and all(names and attribute not in names for names in spelt)
    if not dynamic or others:
        return False
    return any(looks_releasing(call) or _is_given_it(method, call) for call in calls)


def _spelt_out(method: Function, call: ast.Call) -> set[str]:
    """`"rows"` and `"lanes"` of `for name in ("rows", "lanes"):`, around `getattr(self, name)`."""
    asked = call.args[1] if len(call.args) > 1 else None
    turns = [node for node in method.nodes if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension)]
    bound = [node for node in turns if getattr(node.target, "id", "") == getattr(asked, "id", None)]
    match bound:
        case [ast.For(iter=ast.Tuple(elts=names) | ast.List(elts=names))] | [
            ast.comprehension(iter=ast.Tuple(elts=names) | ast.List(elts=names))
        ]:
            spelt = [each.value for each in names if isinstance(each, ast.Constant)]
            return {str(each) for each in spelt} if len(spelt) == len(names) else set()
    return set()


def _is_given_it(method: Function, call: ast.Call) -> bool:
    """`stream = getattr(self, name)`, and `streams.put_down(stream)`, or both in one."""
    given = {argument.id for argument in call.args if isinstance(argument, ast.Name)}
    if last_name(call) in ("getattr", "setattr", "isinstance", "print"):
        return False
    return any(isinstance(each, ast.Call) and last_name(each) == "getattr" for each in call.args) or any(
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and last_name(node.value) == "getattr"
        and any(isinstance(target, ast.Name) and target.id in given for target in node.targets)
        for node in method.statements
    )


def shared(method: Function, attribute: str) -> bool:
    """A constructor has the field from its caller, or hands it to somebody else, who has it as well."""
    own = method.owner
    given = (
        argument for call in method.calls for argument in (*call.args, *(k.value for k in call.keywords))
    )
    return any(own_attribute(each, own or "") == attribute for each in given) or any(
        own_attribute(target, own or "") == attribute and getattr(value, "id", None) in method.parameters[1:]
        for target, value in assignments(method)
    )


def asks_or_releases(function: Function, attribute: str) -> bool:
    """The method tests the field, gives it back, calls a cleanup, or works with what is there by name."""
    owner = function.parameters[0]
    for node in function.nodes:
        test = getattr(node, "test", None)
        if isinstance(test, ast.AST) and attribute in _asked_in(test):
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if (
                isinstance(node.func.value, ast.Name)
                and node.func.value.id == owner
                and CLEANUP.fullmatch(node.func.attr)
            ):
                return True
            if looks_releasing(node) and attribute in _attributes_in(node):
                return True
    return False


def _asked_in(test: ast.AST) -> set[str]:
    """But for `self.file.tell() > limit`: what it says of itself is no question whether it is there."""
    measures = (each for each in walk(test) if isinstance(each, ast.Compare) and _is_order(each.ops[0]))
    measured = {id(part.value) for each in measures for part in walk(each) if isinstance(part, ast.Attribute)}
    return {each.attr for each in walk(test) if isinstance(each, ast.Attribute) and id(each) not in measured}


def _is_order(way: ast.cmpop) -> bool:
    return isinstance(way, ast.Lt | ast.LtE | ast.Gt | ast.GtE)


def _attributes_in(node: ast.AST) -> set[str]:
    return {inner.attr for inner in walk(node) if isinstance(inner, ast.Attribute)}


def strikes_off_what_it_freed(method: Function, attribute: str) -> bool:
    """`for freed in self.ring.free_buf(): del self.index[self.keys[freed]]`: the table follows its pool."""
    own = method.owner or ""
    for loop in method.statements:
        if not isinstance(loop, ast.For):
            continue
        over = given_to(method, loop.iter.id) if isinstance(loop.iter, ast.Name) else [loop.iter]
        freed = any(isinstance(each, ast.Call) and looks_releasing(each) for each in over)
        struck = (node for node in walk(loop) if isinstance(node, ast.Subscript))
        if freed and any(
            isinstance(n.ctx, ast.Del) and own_attribute(n.value, own) == attribute for n in struck
        ):
            return True
    return False
