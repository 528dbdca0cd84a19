"""Exit methods that give nothing back on some way, though nothing says that there is nothing: the body was
slow, the share was large, the layer is frozen."""

import ast
from collections.abc import Iterator, Sequence, Set

from auditor.project.code.bindings import assignments, given_to, own_attribute, suites_of
from auditor.project.code.entered import ENTERS
from auditor.project.code.modules import Function, last_part
from auditor.project.code.release_names import ENDING
from auditor.project.fields.filling_again import WORKING
from auditor.project.fields.of_the_exception import is_of_the_exception, names_in
from auditor.project.meaning.not_owning import asked_at_birth
from auditor.protocols.vocabulary import split
from auditor.source.nodes import walk

BEGINNINGS = ENTERS | {"__init__", "__post_init__"}
ASKING = (ast.If, ast.IfExp, ast.While, ast.Assert)
LOOPING = (ast.For, ast.AsyncFor, ast.comprehension)
CHOOSING = (*ASKING, *LOOPING, ast.BoolOp, ast.Match, ast.ExceptHandler, ast.Lambda)
PROMISING = frozenset({"own", "owns", "owned", "owner", "external", "shared", "borrowed", "keep", "kept",
                       "leave", "auto", "close", "closed", "delete", "managed", "detached",
                       "released"})  # fmt: skip
"""Words of flags by which somebody else may have to end it."""

OWNING = frozenset({"own", "owns", "owned", "owner", "external", "shared", "borrowed", "managed", "auto"})
"""Those of them that say whose it is."""

AT_WORK = frozenset({"query", "busy", "is_busy", "pending", "is_pending", "in_flight", "inflight", "is_ready",
                     "is_running"})  # fmt: skip
"""What tells of a stream, an event or a request how far its work is, and nothing of whose it is."""

LEAVING = (ast.Return, ast.Raise, ast.Break, ast.Continue)


def _hands_out(method: Function, field: str) -> bool:
    """`self.transferred = True`, and `return self.slot`: whoever asked for it has it."""
    returned = (node.value for node in method.statements if isinstance(node, ast.Return) and node.value)
    return not method.is_property and any(
        own_attribute(each, method.owner or "") == field for each in returned
    )


def asks_other_things(
    method: Function, family: Sequence[Function], field: str, begun: ast.Call,
    working: Set[Function] = frozenset(), borrowing: Set[str] = frozenset(),
) -> bool:  # fmt: skip
    """All its conditions read fields of its object that say nothing of this one: no method but the
    constructor decides them and has to do with this one as well, none is a promise to keep it, and none asks
    whether there is a pool at all. Where the method ends another field before it asks, which was filled with
    this one, there is something to end; then only marks that it leaves for its next call say otherwise.
    `working` are methods that work with the lease and leave it where it is, `borrowing` those that only
    borrow what they are told."""
    own = method.owner
    if own is None:
        return False
    tests = [test for test in what_decides(method, own, field) if not is_of_the_exception(test, method)]
    if len(tests) > 1:
        tests = [test for test in tests if not _says_it_was_called(test, method, own, family)]
    asked = [set(own_attributes(test, method, own)) for test in tests]
    all_asked = set().union(*asked)
    involved = [
        each
        for each in family
        if each.name != "__init__"
        and ((each not in working and _moves(each, field)) or _hands_out(each, field))
    ]
    others = [each for each in involved if each is not method]
    beginner = next((each for each in family if begun in each.calls), None)
    begins_to_end = beginner is not None and _ends_another(method, own, field, beginner, tests)
    deciding = [each for each in others if each is not beginner] if begins_to_end else involved
    decided = {own_attribute(target, each.owner or "") for each in deciding for target in _written(each)}
    decided |= set(_marked(method, own)) | set(_set_by_heirs(family, involved))
    births = [each for each in family if each.name == "__init__"]
    decided |= {flag for each in births for flag, _ in asked_at_birth(each, f".{field}")}
    about = [test for test, names in zip(tests, asked, strict=True) if field in names]
    if all(_asks_how_far_it_is(test, own, field) for test in about):
        decided.discard(field)  # what is still at work is still there
    keeping = (each for each in others if not any(calls_with(each, field)))
    emptied = {field for each in keeping for field in _emptied(each)}
    lenders = {node.attr for node in walk(begun.func) if isinstance(node, ast.Attribute)}
    return (
        bool(tests)
        and all(asked)
        and not any(PROMISING & set(split(attr)) for attr in all_asked)
        and (decided.isdisjoint(all_asked) or (len(tests) == 1 and all_asked <= emptied))
        and _has_one_end(method, own, field, borrowing)
        and not any(_asks_others(test, method, own) for test in tests)
        and not any(asks_for(test, own, lender) for test in tests for lender in lenders)
    )


def _asks_how_far_it_is(test: ast.expr, own: str, field: str) -> bool:
    """`not self.stream.query()`, `self.request.pending`"""
    asked = test.operand if isinstance(test, ast.UnaryOp) else test
    asked = asked.func if isinstance(asked, ast.Call) and not asked.args else asked
    return (
        isinstance(asked, ast.Attribute)
        and asked.attr in AT_WORK
        and own_attribute(asked.value, own) == field
    )


def _set_by_heirs(family: Sequence[Function], involved: Sequence[Function]) -> Iterator[str]:
    """`self._open = True` of a method that calls one of these, `super().start()`."""
    names = {each.name for each in involved}
    for method in family:
        if method.name != "__init__" and any(_asked_of_super(c) in names for c in method.calls):
            yield from (own_attribute(target, method.owner or "") or "" for target in _written(method))


def _asked_of_super(call: ast.Call) -> str:
    match call.func:
        case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=name):
            return name
    return ""


def _says_it_was_called(test: ast.expr, method: Function, own: str, family: Sequence[Function]) -> bool:
    """`self.closed`, which nobody but this method sets to True."""
    mark = own_attribute(test, own)
    setting = [
        (each, value)
        for each in family
        for target, value in assignments(each)
        if mark is not None and own_attribute(target, each.owner or "") == mark
    ]
    return any(each is method for each, _ in setting) and all(
        isinstance(value, ast.Constant) and value.value is (each is method) for each, value in setting
    )


def _ends_another(
    method: Function, own: str, field: str, beginner: Function, tests: Sequence[ast.expr]
) -> bool:
    """`self.data.close()` before the first of these conditions, of what `begin` always puts beside it."""
    beside = {
        name: value
        for target, value in assignments(beginner)
        if isinstance(value, ast.Call) and (name := own_attribute(target, beginner.owner or ""))
        if name != field and begins_always(beginner, value, name)
    }
    first = min((test.lineno for test in tests), default=0)
    chosen = {id(inner) for node in method.nodes if isinstance(node, CHOOSING) for inner in walk(node)}
    before = (call for call in method.calls if call.lineno < first and id(call) not in chosen)
    return any(
        (begun := beside.get(own_attribute(each, own) or "")) is not None
        and (ENDING.search(call.func.attr) or _of_the_same_pool(begun, call))
        for call in before
        if isinstance(call.func, ast.Attribute)
        for each in (call.func.value, *call.args)
    )


def _of_the_same_pool(begun: ast.Call, call: ast.Call) -> bool:
    """`self.broker.lend_stream()` and `self.broker.reclaim_stream(self.stream)`"""
    match begun.func, call.func:
        case ast.Attribute(value=one, attr=first), ast.Attribute(value=other, attr=last):
            words = split(first)[1:]
            return bool(words) and words == split(last)[1:] and ast.unparse(one) == ast.unparse(other)
    return False


def _marked(method: Function, own: str) -> Iterator[str]:
    """`self.finished = True`, `self.users -= 1`: by these it knows whether it was called before."""
    for node in method.nodes:
        match node:
            case ast.AugAssign(target=target):
                yield own_attribute(target, own) or ""
            case ast.Assign(targets=targets, value=ast.Constant(value=True | False | None)):
                yield from (own_attribute(target, own) or "" for target in targets)


def asks_how_it_went(method: Function, family: Sequence[Function], field: str) -> bool:
    """All its conditions are about the exception that `__exit__` is told of, or about what the object was
    told when it was made: `issubclass(kind, self.expected)`, `kind is not None and not self.strict`."""
    own = method.owner
    tests = list(what_decides(method, own, field)) if own is not None else []
    told = _told_at_birth(family, tests, method)
    of_it = [test for test in tests if is_of_the_exception(test, method, {own or ""} if told else set())]
    settings = (test for test in tests if test not in of_it)
    return bool(of_it) and told and all(names_in(test) == {own} for test in settings)


def _told_at_birth(family: Sequence[Function], tests: Sequence[ast.expr], method: Function) -> bool:
    """Nobody but the constructor sets what of its own the tests read, and it has no say in who owns what."""
    own = method.owner or ""
    asked = {attr for test in tests for attr in own_attributes(test, method, own)}
    later = [each for each in family if each.name not in ("__init__", "__post_init__")]
    written = {own_attribute(target, each.owner or "") for each in later for target in _written(each)}
    return asked.isdisjoint(written) and not any(OWNING & set(split(attr)) for attr in asked)


def _moves(method: Function, field: str) -> bool:
    """It may end what is in the field, or put it there: it does more than work on it."""
    return bool(_moved(method.nodes, field))


def _moved(nodes: Sequence[ast.AST], field: str) -> set[int]:
    """Where the field itself is meant, and not what is done with it: `self.buffer.fill_(0)`,
    `self.session.commit()` and `self.buffer[:n] = x` work on it, and so does `memory[self.row] = x`;
    `self.row is not None` only asks."""
    worked_on = {id(each) for node in nodes for each in _worked_on(node)}
    meant = (node for node in nodes if isinstance(node, ast.Attribute) and node.attr == field)
    return {id(node) for node in meant if id(node) not in worked_on}


def _worked_on(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Subscript(value=value, slice=index):
            yield from (value, index)
        case ast.Attribute(value=value, attr=attr) if ENDING.search(attr) is None:
            yield value
        case ast.Compare(left=asked, ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]):
            yield asked
        case ast.If(test=asked):
            yield asked


def what_decides(method: Function, own: str, field: str) -> Iterator[ast.expr]:
    """Conditions on which it depends whether the field is ended, but for whether there is anything in it."""
    moved = _moved(method.nodes, field)
    for node in method.nodes:
        if isinstance(node, ASKING) and any(
            isinstance(inner, LEAVING) or id(inner) in moved for inner in walk(node)
        ):
            yield from (part for part in parts_of(node.test) if not asks_for(part, own, field))


def _emptied(method: Function) -> Iterator[str]:
    """Fields that it sets to nothing: the work is done that they tell of, and the lease is still there."""
    for target, value in assignments(method):
        field = own_attribute(target, method.owner or "")
        if field is not None and isinstance(value, ast.Constant) and not value.value:
            yield field


def _has_one_end(method: Function, own: str, field: str, borrowing: Set[str]) -> bool:
    """One call gives it back; where another is given it, that may keep it, `self.sink.take(self.buffer)`,
    unless its own end comes next, or it says that it waits for it, `main.wait_stream(self.stream)`, or is
    known to borrow, `self._reduce(self.grad)`."""
    worked_with = {id(node) for node in _before_its_end(method, own, field)}
    given = (
        call
        for call in calls_with(method, field)
        if id(call) not in worked_with
        and not WORKING.fullmatch(last_part(call.func))
        and own_attribute(call.func, own) not in borrowing
    )
    ending = {ast.unparse(call.func) for call in given}
    ended = any(ends_itself(call, own, field) for call in method.calls)
    return len(ending) + ended < 2


def _before_its_end(method: Function, own: str, field: str) -> Iterator[ast.AST]:
    """`json.dump(rows, self.index)`, followed by `self.index.close()`."""
    for suite in suites_of(method.node):
        ends = [
            number
            for number, each in enumerate(suite)
            if isinstance(each, ast.Expr) and ends_itself(each.value, own, field)
        ]
        for statement in suite[: max(ends, default=0)]:
            yield from walk(statement) if isinstance(statement, ast.Expr) else ()


def ends_itself(call: ast.expr, own: str, field: str) -> bool:
    match call:
        case ast.Call(func=ast.Attribute(value=ended, attr=way)):
            return ENDING.search(way) is not None and own_attribute(ended, own) == field
    return False


def calls_with(method: Function, field: str) -> Iterator[ast.Call]:
    own = method.owner or ""
    return (call for call in method.calls if any(own_attribute(arg, own) == field for arg in call.args))


def only_writes_with(method: Function, field: str) -> bool:
    """`self.nic.write_local(self.region, page)`, and no more."""
    own = method.owner or ""
    given = list(calls_with(method, field))
    shown = {id(arg) for call in given for arg in call.args}
    meant = (node for node in method.nodes if isinstance(node, ast.Attribute) and node.attr == field)
    alone = all(own_attribute(node, own) is None or id(node) in shown for node in meant)
    return bool(given) and alone and all(WORKING.fullmatch(last_part(call.func)) for call in given)


def parts_of(test: ast.expr) -> Iterator[ast.expr]:
    """Of `a and b`, both."""
    for each in test.values if isinstance(test, ast.BoolOp) else ():
        yield from parts_of(each)
    if not isinstance(test, ast.BoolOp):
        yield test


def begins_always(function: Function, call: ast.Call, field: str) -> bool:
    """Every call of the function that goes well gets as far as that, or has found the field filled."""
    own = function.owner or ""
    for statement in function.node.body if isinstance(function.node.body, list) else ():
        parts = list(walk(statement))
        looks = isinstance(statement, ast.If) and asks_for(statement.test, own, field)
        if any(part is call for part in parts):
            choices = (
                part for part in parts if isinstance(part, CHOOSING) and not (looks and part is statement)
            )
            return not any(inner is call for choice in choices for inner in walk(choice))
        if any(isinstance(part, ast.Return) for part in parts) and not looks:
            return False
    return False


def leaves_without_one(method: Function, field: str) -> bool:
    """`if self.buffer is None: return` comes first."""
    body = method.node.body if isinstance(method.node.body, list) else []
    first = next((each for each in body if not isinstance(each, ast.Expr)), None)
    if not isinstance(first, ast.If) or not isinstance(first.body[-1], ast.Return):
        return False
    return asks_for(first.test, method.owner or "", field)


def _asks_others(test: ast.expr, method: Function, own: str) -> bool:
    """What the method is told, or what another object says of itself at this time."""
    names = {name for name in names_in(test) if name[:1].islower() and not list(given_to(method, name))}
    return bool((set(method.parameters) | names) & names_in(test) - {own})


def _written(method: Function) -> Iterator[ast.expr]:
    """Not `self.result = self.result.clone()`: whether there is one stays as it was."""
    same = {
        id(target)
        for target, value in assignments(method)
        if isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and ast.unparse(value.func.value) == ast.unparse(target)
    }
    for node in method.nodes:
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and id(node) not in same:
            yield node


def overridden(method: Function, family: Sequence[Function]) -> bool:
    """`family` begins with the class itself: another method of the name comes before this one."""
    return next(each for each in family if each.name == method.name) is not method


def asks_for(test: ast.expr, own: str, field: str) -> bool:
    match test:
        case ast.Compare(left=asked, ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]):
            return own_attribute(asked, own) == field
        case ast.UnaryOp(op=ast.Not(), operand=asked):
            return own_attribute(asked, own) == field
    return own_attribute(test, own) == field


def own_attributes(node: ast.expr, method: Function, own: str) -> Iterator[str]:
    """Also those that a local name was made of."""
    values = [node]
    for inner in walk(node):
        if isinstance(inner, ast.Name):
            values += given_to(method, inner.id)
    for value in values:
        for inner in walk(value):
            match inner:
                case ast.Attribute() if own_attribute(inner, own):
                    yield inner.attr
                case ast.Call(
                    func=ast.Name(id="getattr"), args=[ast.Name(id=name), ast.Constant(value=str(attr)), *_]
                ) if name == own:
                    yield attr
