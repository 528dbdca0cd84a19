"""Counts of those who need an object: `retain(page)` raises the `page.refs` that `drop(page)` lowers."""

import ast
import re
from collections.abc import Iterator, Set

from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.modules import Function
from auditor.project.shapes.born_with_one import counts_from_one
from auditor.project.shapes.field_work import field_work
from auditor.project.shapes.name_bindings import mentions
from auditor.project.shapes.pool_state import own_parameters
from auditor.project.shapes.use_counts import asks, changed
from auditor.protocols.vocabulary import COUNTING, PAIRS, negates, pairs_with, split, take_apart, undoes
from auditor.source.nodes import walk

REFERENCES = frozenset({"ref", "refs", "refcount", "refcnt", "references", "pins"})
"""Words in the names of counts of those who need an object."""

USERS = frozenset(
    {
        "uses",
        "users",
        "readers",
        "holders",
        "borrowers",
        "sharers",
        "share",
        "shares",
        "owners",
        "rc",
        "count",
        "counts",
        "cnt",
    }
)
"""The same of others, where the last to go is asked for: uses alone may be statistics."""

SIGNS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-"}
"""What a text has that counts so."""

COUNTED_DOWN = frozenset().union(*(others for verbs, others in PAIRS if verbs & COUNTING))


def reference_counts(methods: list[Function]) -> Iterator[tuple[Function, Function]]:
    """`retain(page)` raises the `page.refs` that `drop(page)` lowers: the count is the object's own; or
    `self.refs[page]`, of each of those that it is told."""
    cls = methods[0].cls if methods else None
    if cls is not None and not any(word in cls.text for word in ("ref", "pin", *USERS)):
        return
    raised = {id(method): _counted_of_told(method, ast.Add) for method in methods}
    if not any(raised.values()):
        return
    lowered = {id(method): _counted_of_told(method, ast.Sub) for method in methods}
    for begins in methods:
        for ends in methods if raised[id(begins)] else ():
            names = raised[id(begins)] & lowered[id(ends)]
            called = bool(names) and undoes(ends.name, begins.name)
            both = {
                name for name in names if _of_users(ends, name) or (called and asks(field_work(ends), name))
            }
            if both and not (raised[id(ends)] or lowered[id(begins)]):
                yield begins, ends


def counts_what_it_returns(function: Function, partners: list[Function]) -> bool:
    """`worker.load += 1; return worker`, where a partner lowers the load of the one that it is told."""
    lowered = {
        count
        for partner in partners
        for name, count in _counts_of_names(partner, ast.Sub)
        if name in own_parameters(partner)
    }
    returned = {
        node.value.id
        for node in function.statements
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Name)
    }
    told = own_parameters(function)
    return any(
        name in returned and name not in told and count in lowered
        for name, count in _counts_of_names(function, ast.Add)
    )


def counts_of_what_is_returned(methods: list[Function]) -> Iterator[tuple[Function, Function]]:
    """`worker = self.pick()` has one load more, until `self.unpick(worker)`."""
    for begins in methods:
        undoing = [each for each in methods if undoes(each.name, begins.name)]
        for ends in undoing if counts_what_it_returns(begins, undoing) else ():
            yield begins, ends


def counts_of_objects(methods: list[Function]) -> Iterator[tuple[Function, Function, str, bool]]:
    """Who raises a count of what it returns or is told, who lowers the same of what it is told, under which
    of its parameters; and whether the first is told of the object. Their own names are not asked."""
    text = methods[0].cls.text if methods and methods[0].cls is not None else ""
    if "+= 1" not in text or "-= 1" not in text:
        return
    raised = {id(method): _raised_of_objects(method) for method in methods}
    for ends in methods if any(raised.values()) else ():
        lowered = dict(_lowered_of_told(ends))
        for begins in methods if lowered else ():
            both = {
                count: told
                for count, told in raised[id(begins)].items()
                if count in lowered
                and (
                    _decides(ends, count, told and not negates(ends.name, begins.name))
                    or _is_full(begins, count)
                    or _is_chosen_by(begins, count)
                )
            }
            if begins is not ends and both and not raised[id(ends)].keys() & lowered.keys():
                count = min(both)
                yield begins, ends, lowered[count], both[count]


def counts_of_itself(methods: list[Function]) -> Iterator[tuple[Function, Function]]:
    """`gather` raises the `self.users` that `partition` lowers, and somebody asks whether there are any."""
    for ends in methods if methods and "-= 1" in (methods[0].cls.text if methods[0].cls else "") else ():
        lowered = {name for name, way in field_work(ends).counted if way < 0} - field_work(ends).summed
        for begins in methods if lowered and not own_parameters(ends) else ():
            raised = {name for name, way in field_work(begins).counted if way > 0} - field_work(begins).summed
            if begins is not ends and any(_of_users_itself(begins, ends, name) for name in raised & lowered):
                yield begins, ends


def _of_users_itself(begins: Function, ends: Function, count: str) -> bool:
    called = not (REFERENCES | USERS).isdisjoint(split(count))
    return (called and _decides(ends, count, True)) or counts_from_one(begins, ends, count)


def _decides(ends: Function, count: str, told: bool) -> bool:
    """Somebody asks whether anybody needs the object; visits to a user's groups are no references to him."""
    text = ends.cls.text if ends.cls is not None else ""
    named = rf"(?:\.{count}\b|\[['\"]{count}['\"]\])"
    compared = rf"{named}\s*(?:==|!=|<=|>)"
    plainly = rf"\b(?:not|if|elif|while|and|or) (?:\w+\.)+{count}\b(?!\s*[-+*/%.(\[<])"
    asked = re.search(rf"{compared}|{plainly}", text) is not None
    words = set(split(count))
    return bool(REFERENCES & words) or (asked and (not told or bool(USERS & words)))


def _is_full(begins: Function, count: str) -> bool:
    """`if worker.load >= worker.limit: return False`: there is room for so many."""
    return any(
        isinstance(node, ast.If)
        and isinstance(node.body[-1], ast.Return | ast.Raise | ast.Continue)
        and any(
            isinstance(test, ast.Compare)
            and isinstance(test.left, ast.Attribute)
            and test.left.attr == count
            and isinstance(test.ops[0], ast.Gt | ast.GtE)
            for test in walk(node.test)
        )
        for node in begins.statements
    )


def _is_chosen_by(begins: Function, count: str) -> bool:
    """`min(self.workers, key=lambda worker: worker.load)`: who has the fewest gets the next."""
    keys = (
        keyword.value
        for call in begins.calls
        if isinstance(call.func, ast.Name) and call.func.id in ("min", "sorted")
        for keyword in call.keywords
        if keyword.arg == "key"
    )
    return any(isinstance(each, ast.Attribute) and each.attr == count for key in keys for each in walk(key))


def _raised_of_objects(method: Function) -> dict[str, bool]:
    """Counts of what it returns, by their names; true for those of what it is told."""
    counted = [*_counts_of_names(method, ast.Add), *_counts_by_helpers(method, ast.Add)]
    if not counted:
        return {}
    work = field_work(method)
    returned = {value.id for value in work.returned if isinstance(value, ast.Name)}
    returned |= {*_put_into(method, returned - work.told)}
    if returned & work.told:
        returned = set()  # `add(entry)` returns the entry that was there, or this one
    found = {count: True for name, count in counted if name in work.from_told - returned}
    found.update((count, False) for name, count in counted if name in returned)
    return found


def _put_into(method: Function, lists: Set[str]) -> Iterator[str]:
    """`block` of `hit.append(block)`, where `hit` is returned: each of them is one more's."""
    for call in method.calls:
        match call:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[ast.Name(id=each)]
            ) if name in lists:
                yield each


def _lowered_of_told(method: Function) -> Iterator[tuple[str, str]]:
    """`readers` and `entry` of `entry.readers -= 1`, in a helper, too, that is told of the entry."""
    told = own_parameters(method)
    for parameter in told:
        names = _the_same(method, parameter) | {*_each_of(method, parameter)}
        yield from ((count, parameter) for name, count in _counts_of_names(method, ast.Sub) if name in names)
    yield from ((count, name) for name, count in _counts_by_helpers(method, ast.Sub) if name in told)


def _counts_by_helpers(method: Function, way: type[ast.operator]) -> Iterator[tuple[str, str]]:
    """`node` and `readers` of `self._hold(node)`, which raises that of the node and of its parents."""
    helpers = method.cls.methods if method.cls is not None else {}
    for call in method.calls if helpers else ():
        helper = helpers.get(own_attribute(call.func, method.owner or "") or "")
        if helper is None or helper is method:
            continue
        for parameter, given in zip(own_parameters(helper), call.args, strict=False):
            if isinstance(given, ast.Name):
                names = _the_same(helper, parameter)
                yield from (
                    (given.id, count) for name, count in _counts_of_names(helper, way) if name in names
                )


def _the_same(method: Function, parameter: str) -> set[str]:
    """With names of it, and of what it leads to: `node = node.parent`; not of what a table has under it."""
    names = {parameter}
    for target, value in assignments(method):
        root = value
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(target, ast.Name) and isinstance(root, ast.Name) and root.id in names:
            names.add(target.id)
    return names


def _counts_of_names(function: Function, way: type[ast.operator]) -> Iterator[tuple[str, str]]:
    """`worker` and `load` of `worker.load += 1`, or of `worker["load"] += 1`."""
    own = function.owner
    for node in function.statements:
        if isinstance(node, ast.AugAssign) and isinstance(node.op, way):
            name, count = _part_of_record(node.target)
            if name and name != own:
                yield name, count


def _part_of_record(target: ast.expr) -> tuple[str, str]:
    match target:
        case (
            ast.Attribute(value=ast.Name(id=name), attr=count)
            | ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str() as count))
        ):
            return name, count
    return "", ""


def _counted_of_told(method: Function, way: type[ast.operator]) -> set[str]:
    """Numbers of references, by their names, of the first thing that it is told."""
    if SIGNS[way] not in method.text or not any(map(method.text.lower().__contains__, REFERENCES | USERS)):
        return set()
    counted = [target for target, op in changed(method) if isinstance(op, way)]
    if not counted:  # as in most methods
        return set()
    told = {*own_parameters(method)[:1]}
    told |= {name for parameter in told for name in _each_of(method, parameter)}
    perhaps = _set_by_choice(method)
    targets = [target for target in counted if id(target) not in perhaps]
    of_object = {count for name, count in map(_part_of_record, targets) if name in told}
    in_table = {own for target in targets if (own := _table_of_told(method, target)) is not None}
    return {name for name in of_object | in_table if not (REFERENCES | USERS).isdisjoint(split(name))}


def _each_of(method: Function, parameter: str) -> Iterator[str]:
    """`block` of `for block in blocks:`, in whatever order."""
    for loop in method.statements:
        match loop:
            case (
                ast.For(target=ast.Name(id=each), iter=ast.Name(id=many))
                | ast.For(
                    target=ast.Name(id=each),
                    iter=ast.Call(func=ast.Name(id="reversed"), args=[ast.Name(id=many)]),
                )
            ) if many == parameter:
                yield each


def _set_by_choice(method: Function) -> set[int]:
    """Targets below an `if lock:`, which leaves it to the caller."""
    return {
        id(target)
        for choice in method.statements
        if isinstance(choice, ast.If)
        for node in walk(choice)
        if isinstance(node, ast.Assign)
        for target in node.targets
    }


def _of_users(ends: Function, name: str) -> bool:
    """`if page.uses == 0:`, `if not page.users:`"""
    return not REFERENCES.isdisjoint(split(name)) or asks(field_work(ends), name)


def _table_of_told(method: Function, target: ast.expr) -> str | None:
    """`refs` of `self.refs[page]`, where it is told the page, or pages."""
    own = method.owner
    if own is None or not isinstance(target, ast.Subscript):
        return None
    told = field_work(method).derived(set(own_parameters(method)[:1]), frozenset())
    of_told = mentions(target.slice, told, frozenset())
    return own_attribute(target.value, own) if of_told else None


def returns_what_it_is_told(method: Function) -> bool:
    """`return [*pages]`: the references are those of what is returned; not `return page.data`, nor a bool."""
    if getattr(getattr(method.node, "returns", None), "id", "") == "bool":
        return False
    work = field_work(method)
    told = work.derived(set(own_parameters(method)[:1]), frozenset())
    answers = [value for value in work.returned if not isinstance(value, ast.Constant)]
    return bool(answers) and all(_is_told(value, told) for value in answers)


def returns_the_same(method: Function) -> bool:
    """`return node` of `lock_path(node)`, which counts, and is still told of that node."""
    counts = any(isinstance(node, ast.AugAssign) for node in method.statements)
    told = own_parameters(method)[:1]
    assigned = {target.id for target, _ in assignments(method) if isinstance(target, ast.Name)}
    answers = [value for value in field_work(method).returned if not isinstance(value, ast.Constant)]
    names = {value.id if isinstance(value, ast.Name) else "" for value in answers}
    return counts and names == {*told} and names.isdisjoint(assigned)


def counts_references(method: Function) -> bool:
    """It raises a number of references of the first thing that it is told."""
    return bool(_counted_of_told(method, ast.Add))


def hands_out_a_key(begins: Function, ends: Function) -> bool:
    """`register(region)` returns the `region.index` that `deregister(key)` is told."""
    told = own_parameters(begins)
    answers = [value for value in field_work(begins).returned if not isinstance(value, ast.Constant)]
    return (
        bool(answers)
        and set(told).isdisjoint(own_parameters(ends))
        and all(
            isinstance(value, ast.Attribute) and getattr(value.value, "id", "") in told[:1]
            for value in answers
        )
    )


def _is_told(value: ast.expr, told: Set[str]) -> bool:
    """Not what lies under it: `self.loaded[name]`."""
    keys = {id(name) for node in walk(value) if isinstance(node, ast.Subscript) for name in walk(node.slice)}
    calls = {id(node.func) for node in walk(value) if isinstance(node, ast.Call)}
    fields = [node for node in walk(value) if isinstance(node, ast.Attribute) and id(node) not in calls]
    parts = {id(node.value) for node in fields}
    named = (node for node in walk(value) if isinstance(node, ast.Name) and node.id in told)
    return any(id(node) not in parts | keys for node in named)


def counts_through(method: Function, partners: list[Function]) -> bool:
    """`lock_path(node)` calls `node.lock()`, `node.parent.lock()`, and a partner calls `unlock` of what it is
    told."""
    up = [name for call in _of_told(method) if (name := take_apart(call, COUNTING)) is not None]
    down = [
        name
        for partner in partners
        for call in _of_told(partner)
        if (name := take_apart(call, COUNTED_DOWN)) is not None
    ]
    return any(pairs_with(one, other) for one in up for other in down)


def _of_told(method: Function) -> Iterator[str]:
    """Methods that it calls of the first thing it is told, or of what that leads to."""
    told = field_work(method).derived(set(own_parameters(method)[:1]), frozenset())
    for call in method.calls:
        match call.func:
            case ast.Attribute(value=owner, attr=attr) if mentions(owner, told, frozenset()):
                yield attr
