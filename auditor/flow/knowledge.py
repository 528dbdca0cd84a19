"""What is known of simple conditions on a path, so that correlated branches stay correlated."""

import re
from functools import lru_cache

from auditor.flow.clauses import Fact, clause, decided, is_clause, literals, where_ways_meet
from auditor.flow.meanwhile import still_known, waits
from auditor.ir.graph import Graph
from auditor.ir.ops import (
    RESULT,
    Assume,
    Await,
    Call,
    Constant,
    Define,
    Delete,
    EndStatement,
    Fresh,
    Havoc,
    InPlace,
    Move,
    Next,
    Op,
    Path,
    Store,
    Unpack,
    is_temporary,
)

Knowledge = frozenset[Fact]
"""(condition key, its truth). A key `=flag:key` records that a flag holds the truth of another condition; a
key that begins with `|` that one of two facts holds (`clauses`)."""

NOTHING: Knowledge = frozenset()
FILLING = frozenset({"append", "appendleft", "add", "insert"})
EXTENDING = frozenset({"extend", "extendleft", "update"})
FILLING_ANY = FILLING | EXTENDING
EMPTYING = frozenset({"pop", "popleft", "popitem", "remove", "discard", "clear"})
"""Lists that are filled together are tested for one another: `if keys:` after `keys.append`,
`blocks.append`."""

INTERMEDIATE = "%"
"""Begins the name of a value that ends with its statement."""

EQUAL, SAME = " == ", " is "

OWN = frozenset({"self", "cls"})
CLASS = re.compile(r"_*[A-Z]\w*[a-z]\w*")
"""What is called by such a name makes an object."""

LITERAL = re.compile(r"-?\d[\w.]*|'[^']*'|\"[^\"]*\"")
"""All of a side, for of `x == "a" and y` no side is a literal."""


def join(left: Knowledge, right: Knowledge) -> Knowledge:
    both = left & right
    if len(both) in (len(left), len(right)):
        return both
    return both.union(where_ways_meet(left - both, right - both))


def learn(graph: Graph, op: Op, known: Knowledge) -> Knowledge | None:
    """What is known after `op`; None when the branch it assumes contradicts what is known."""
    if known and waits(op):
        known = still_known(graph, known)
    match op:
        case Assume():
            return _assume(graph, op, known)
        case Define():
            return known | {(f"={op.name}:{op.key}", op.value)}
        case Havoc():
            return frozenset(fact for fact in known if op.keys.isdisjoint(_keys(fact)))
        case Constant(target=target):
            return _constant(forget(graph, target, known), target, op.value)
        case Move(target=target, source=source) | Await(target=target, source=source):
            if target == source:
                return known
            known = _copy(forget(graph, target, known), target, source)
            return known | _one_and_the_same(graph, target, source)
        case Await(target=target, source=source) if is_temporary(source):
            return _copy(forget(graph, target, known), target, source)  # `if not await gate.acquire():`
        case Fresh(target=target) | InPlace(target=target) | Delete(target=target) | Next(target=target):
            return forget(graph, target, known)
        case Store(target=target, source=source):
            return _stored(graph, forget(graph, target, known), target, source)
        case Call():
            return _called(graph, op, forget(graph, op.target, known))
        case EndStatement():
            if not any(INTERMEDIATE in key for key, _ in known):
                return known
            return frozenset(fact for fact in known if not any(map(_is_passing, _keys(fact))))
        case Unpack(targets=targets):
            before = known
            for _, target in targets:
                known = forget(graph, target, known)
            for component, target in targets:
                known = _copy(known, target, (*op.source, component), before)
    return known


def _is_passing(key: str) -> bool:
    """About an intermediate value, which ends with its statement; the result is there until the function is
    left."""
    return key[0] == INTERMEDIATE and not key.startswith(RESULT[0])


def _keys(fact: Fact) -> tuple[str, ...]:
    return tuple(key for key, _ in literals(fact)) if is_clause(fact) else (fact[0],)


def _called(graph: Graph, call: Call, known: Knowledge) -> Knowledge:
    """A list that is filled is not empty; one that something is taken from may be."""
    for written in graph.rewrites.get(id(call), ()):
        known = forget(graph, ("", written), known)
    if CLASS.fullmatch(call.method) and len(call.target) == 1:
        known |= {(f"{call.target[0].lstrip('@')} is None", False)}
    if call.receiver is not None and len(call.receiver) == 2:
        return _filled_in(graph, call.receiver, call.method, known)
    if call.receiver is None or len(call.receiver) != 1:
        return known
    name = call.receiver[0]
    if call.method in FILLING_ANY:
        counted = f"len({name.lstrip('@')})"  # `while len(blocks) < n:` ends some time
        known = frozenset(fact for fact in known if counted not in fact[0])
    if call.method in FILLING and not name.startswith("%"):
        return known | {(name.lstrip("@"), True)}
    emptied = call.method in EMPTYING and name not in OWN  # `self.clear()` is a method like any other
    return forget(graph, call.receiver, known) if emptied else known


def _filled_in(graph: Graph, receiver: Path, method: str, known: Knowledge) -> Knowledge:
    """`batch.requests.append(request)` of a batch that is made here, and then `if not batch.requests:`."""
    owner, field = receiver
    if not field.startswith(".") or not owner.isidentifier() or owner in graph.parameters:
        return known
    if method in EMPTYING:
        return forget(graph, receiver, known)
    asked = f"{owner}{field}"
    filled = method in FILLING and asked in graph.condition_names
    return known | {(asked, True)} if filled else known


def forget(graph: Graph, target: Path, known: Knowledge) -> Knowledge:
    """A write to `target` ends what was known of conditions that read it."""
    if not known:
        return known
    if len(target) == 1:
        written = target[0].lstrip("@")
    elif target[-1].startswith("."):
        written = target[-1]
    else:
        return known
    gone = [fact for fact in known if written in fact[0] and written in _reads(graph, fact[0])]
    return known.difference(gone) if gone else known


def _reads(graph: Graph, key: str) -> frozenset[str]:
    if is_clause((key, True)):
        one, other = literals((key, True))
        return _reads(graph, one[0]) | _reads(graph, other[0])
    if key.startswith("="):
        name, _, asked = key[1:].partition(":")
        return graph.condition_names.get(asked, frozenset()) | {name.removesuffix(" is None")}
    names = graph.condition_names.get(key)
    return names if names is not None else frozenset({key.removesuffix(" is None").partition(EQUAL)[0]})


def _assume(graph: Graph, op: Assume, known: Knowledge) -> Knowledge | None:
    if (op.key, not op.value) in known:
        return None
    learned = {(op.key, op.value)}
    if op.kind == "none" and op.value:
        learned.add((op.key.removesuffix(" is None"), False))
    elif op.kind == "truth" and (op.value or op.key in graph.objects):
        learned.add((f"{op.key} is None", not op.value))
    if op.value and excluded(op.key, known):
        return None
    learned |= _same_as(op, known)
    learned = decided(known, learned)
    if any((key, not truth) in known for key, truth in learned):
        return None
    return known | learned


def _same_as(op: Assume, known: Knowledge) -> set[Fact]:
    """`own = x is None`: `if own:` says so of x, and `if x is None:` of the flag, which outlives x."""
    flag, asked = f"={op.key}:", f":{op.key}"
    learned: set[Fact] = set()
    for key, same in known:
        if key.startswith(flag):
            learned.add((key[len(flag) :], same == op.value))
        elif key.startswith("=") and key.endswith(asked) and key[1 : -len(asked)].isidentifier():
            learned.add((key[1 : -len(asked)], same == op.value))
    return learned


def excluded(key: str, known: Knowledge) -> bool:
    """`x == 1` cannot hold where `x == 2` does, nor `state is FULL` where `state is DONE` does."""
    return any(
        _rules_out(key, other, sign)
        for sign in (EQUAL, SAME)
        if sign in key
        for other, truth in known
        if truth
    )


def _rules_out(key: str, other: str, sign: str) -> bool:
    left, _, right = key.partition(sign)
    return other != key and other.startswith(left + sign) and _distinct(right, other[len(left + sign) :])


def _distinct(one: str, other: str) -> bool:
    """Two literals, or two members of one enumeration: `Family.V4`, `socket.AF_INET6`."""
    if LITERAL.fullmatch(one) and LITERAL.fullmatch(other):
        return True
    owner, _, name = one.rpartition(".")
    owner_too, _, name_too = other.rpartition(".")
    class_like = owner.rpartition(".")[2][:1].isupper() or (name.isupper() and name_too.isupper())
    members = name.isidentifier() and name_too.isidentifier()
    return bool(owner) and owner == owner_too and class_like and members


def _constant(known: Knowledge, target: Path, value: object) -> Knowledge:
    if len(target) != 1 or (target[0].startswith("%") and value not in (None, False, True)):
        return known  # literals that calls are given are asked about by nobody
    name = target[0].lstrip("@")
    facts = {(name, bool(value)), (f"{name} is None", value is None)}
    if isinstance(value, (str, int)) and not isinstance(value, bool):
        facts.add((f"{name} == {value!r}", True))
    return known | facts


def _stored(graph: Graph, known: Knowledge, target: Path, source: Path) -> Knowledge:
    """`self.locked = True`: as much as a local flag says, where somebody asks for it."""
    key, old = "".join(target).lstrip("@"), "".join(source)
    if len(target) != 2 or not target[1].startswith("."):
        return known
    told = ((f"{key}{test}", f"{old}{test}", truth) for test in ("", " is None") for truth in (True, False))
    return known.union(
        (asked, truth)
        for asked, fact, truth in told
        if (fact, truth) in known and asked in graph.condition_names
    )


def _copy(known: Knowledge, target: Path, source: Path, before: Knowledge | None = None) -> Knowledge:
    """`y = x`: what is known of x's truth is known of y's; what is known of `t`'s items is known of an
    unpacked `t`."""
    if len(target) != 1:
        return known
    old, new = "".join(source).lstrip("@"), target[0].lstrip("@")
    told = known if before is None else before
    copies = [copy for fact in told if old in fact[0] and (copy := _renamed(fact, old, new)) is not None]
    return known.union(copies) if copies else known


def _one_and_the_same(graph: Graph, target: Path, source: Path) -> Knowledge:
    """`span = given`, `if span is None: span = pool.take()`: whoever asks later `if given is None:` asks for
    that."""
    if len(target) != 1 or len(source) != 1 or source[0] not in graph.parameters:
        return NOTHING
    both = [(f"{target[0]}{test}", f"{source[0]}{test}") for test in ("", " is None")]
    asked = graph.condition_names
    return frozenset((f"={new}:{old}", True) for new, old in both if new in asked and old in asked)


@lru_cache(maxsize=1 << 16)
def _renamed(fact: Fact, old: str, new: str) -> Fact | None:
    """The fact as one about `new`, if it is about `old`."""
    if is_clause(fact):
        one, other = literals(fact)
        renamed = [_renamed(one, old, new), _renamed(other, old, new)]
        return clause(renamed[0] or one, renamed[1] or other) if any(renamed) else None
    key, truth = fact
    about = (
        key == old
        or key == f"{old} is None"
        or key.startswith((f"{old} == ", f"{old} is ", f"{old} < ", f"{old}["))
        or (old[:1] == "%" and key.startswith(f"{old}."))  # the object has got its name now
    )
    return (new + key[len(old) :], truth) if about else None
