"""How a lease would be given back where it was acquired: the words that a fix writes.

The pool's own class says it best; then settings; then the built-in tables, which know names only. What a
wrapper returned is given back as the wrapper would do it, in the caller's words.
"""

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

from auditor.flow.effects import Handle
from auditor.flow.lease import GivingBack
from auditor.project.code.callers_words import in_callers_words, is_plain
from auditor.project.code.class_model import ClassModel
from auditor.project.code.modules import Function
from auditor.project.meaning.recognise import Recogniser
from auditor.project.meaning.releases import callee_text, names_of
from auditor.project.pools.halves import Half, Pair
from auditor.project.pools.lending import lending
from auditor.protocols.protocol import Pattern, Protocol
from auditor.protocols.vocabulary import ACQUIRE_WORDS, RELEASE_WORDS, pairs_with, split, take_apart

EACH = ("[*]",)
"""Where the leases lie in a list of them."""

DEEPEST = 4
"""Wrappers of wrappers beyond this are not looked through."""

SEVERAL = re.compile(r"\b(?:[Ll]ist|[Ss]equence|Iterable|Collection|[Tt]uple|[Dd]ict|Mapping)\b")
"""Annotations of containers."""

NATURAL = {
    "allocate": ("deallocate", "free", "release"),
    "alloc": ("free", "dealloc", "deallocate", "release"),
    "malloc": ("free",),
    "acquire": ("release",),
    "get": ("put", "release", "return", "free"),
    "take": ("put", "release", "return"),
    "pop": ("push",),
    "borrow": ("return", "giveback", "release"),
    "checkout": ("checkin", "return"),
    "rent": ("return",),
    "reserve": ("unreserve", "release"),
}
"""The usual counterparts of a verb, the first being what most would write."""


def giving_back(
    recogniser: Recogniser, function: Function, call: ast.Call, seen: frozenset[Function] = frozenset()
) -> GivingBack | None:
    """How `function` gives back what `call` acquires in it; None where nothing says so.

    `seen` are the wrappers that are looked through already.
    """
    targets, constructed, dotted = recogniser.calls.targets(function, call)
    names = names_of(targets, constructed, dotted)
    declared = _by_patterns(recogniser.declared, names, function, call, certain=True)
    if declared is not None:
        return declared
    for target in targets:
        if target in recogniser.acquiring:
            return _by_pair(recogniser.calls.model, *recogniser.acquiring[target], function, call)
        if target in recogniser.wrappers:
            wrappers = [each for each in targets if each in recogniser.wrappers and each not in seen]
            return _agreed(recogniser, wrappers, function, call, seen) if len(seen) < DEEPEST else None
    if targets or constructed is not None:
        return None
    alike = recogniser.called_like(call, function) if dotted is None else None
    way = _by_patterns(recogniser.built_in, names, function, call, certain=False)
    if alike is None or (way is not None and _is_used(way, function)):
        return way
    guess = _by_pair(recogniser.calls.model, *alike, function, call)
    if guess is None or _is_used(guess, function) or alike[1].function.module is function.module:
        return guess
    return replace(guess, certain=False)  # some class of that name gives back so; nobody says it is this one


def returns_several(recogniser: Recogniser, function: Function, call: ast.Call) -> bool:
    """Whether what is called says that it returns a list: what one lease does for itself no list can do."""
    targets, _, _ = recogniser.calls.targets(function, call)
    annotations = (getattr(target.node, "returns", None) for target in targets)
    return any(each is not None and SEVERAL.search(ast.unparse(each)) for each in annotations)


def _is_used(way: GivingBack, function: Function) -> bool:
    """Whether the file calls it somewhere."""
    return way.call.partition("(")[0].removeprefix("await ") + "(" in function.module.text


# The pool's class -------------------------------------------------------------------------------------------


def _by_pair(
    model: ClassModel, pair: Pair, half: Half, function: Function, call: ast.Call
) -> GivingBack | None:
    if pair.called:
        return GivingBack("{}()")
    if half.handle is Handle.RECEIVER:
        return _by_itself(pair, half)
    if half.handle is not Handle.RESULT:
        return None
    partners = [
        other.function
        for other in pair.releases
        if pairs_with(half.name, other.name) and _takes_what_it_gave(half.function, other.function)
    ]
    chosen = _best(half.function.name, partners)
    if chosen is None:
        return None
    callee = _beside(call, chosen.name, function)
    if callee is None:
        return None
    waits = "await " if isinstance(chosen.node, ast.AsyncFunctionDef) else ""
    lent = lending(model, pair.owner, half.function, chosen) if pair.owner and not waits else None
    return GivingBack(
        f"{waits}{callee}({{}})",
        _beside(call, lent, function) if lent else None,
        is_plain(call.func),
    )


def _by_itself(pair: Pair, half: Half) -> GivingBack | None:
    """What takes hold of itself, as a count does, lets go of itself."""
    alone = [
        other.function
        for other in pair.releases
        if other.handle is Handle.RECEIVER
        and pairs_with(half.name, other.name)
        and not _required(other.function)
        and isinstance(other.function.node, ast.FunctionDef)
    ]
    chosen = _best(half.function.name, alone)
    return GivingBack(f"{{}}.{chosen.name}()") if chosen is not None else None


def _required(function: Function) -> int:
    """How many arguments a call of the method has to have."""
    assert not isinstance(function.node, ast.Module)
    args = function.node.args
    own = 1 if function.is_method and not function.is_static else 0
    positional = len(args.posonlyargs) + len(args.args) - own - len(args.defaults)
    return positional + sum(default is None for default in args.kw_defaults)


def _best(acquire: str, releases: Iterable[Function]) -> Function | None:
    """The release that is named most like the acquire."""
    words = split(acquire)
    verb = next((word for word in words if word in NATURAL), "")
    natural = NATURAL.get(verb, ())

    def rank(release: Function) -> tuple[bool, int, str]:
        its = split(release.name)
        order = next((natural.index(word) for word in its if word in natural), len(natural))
        same = set(words) - ACQUIRE_WORDS == set(its) - RELEASE_WORDS
        return not same, order, release.name

    return min(releases, key=rank, default=None)


def _takes_what_it_gave(acquire: Function, release: Function) -> bool:
    """One argument is enough, and it is not a list where a single thing was acquired, or the reverse."""
    if isinstance(release.node, (ast.Module, ast.Lambda)):
        return False
    args = release.node.args
    positional = [*args.posonlyargs, *args.args][1 if release.is_method and not release.is_static else 0 :]
    required = len(positional) - len(args.defaults)
    if not positional or required > 1 or any(default is None for default in args.kw_defaults):
        return False
    given, taken = getattr(acquire.node, "returns", None), positional[0].annotation
    return given is None or taken is None or _is_list(given) == _is_list(taken)


def _is_list(annotation: ast.expr) -> bool:
    text = ast.unparse(annotation).lower()
    return any(word in text for word in ("list", "sequence", "iterable", "set[", "tuple["))


# Settings and tables ----------------------------------------------------------------------------------------


def _by_patterns(
    protocols: Sequence[Protocol],
    names: tuple[str, ...],
    function: Function,
    call: ast.Call,
    *,
    certain: bool,
) -> GivingBack | None:
    text = callee_text(call)
    for protocol in protocols:
        if protocol.handle is Handle.RESULT and any(
            pattern.name.fullmatch(name) for pattern in protocol.acquire for name in (text, *names)
        ):
            return _of_protocol(protocol, function, call, certain)
    return None


def _of_protocol(protocol: Protocol, function: Function, call: ast.Call, certain: bool) -> GivingBack | None:
    written = []
    for pattern in protocol.release:
        word = pattern.text.removeprefix("$.").partition("(")[0].rpartition(".")[2].lstrip("*")
        if pattern.on_lease:
            return GivingBack(f"{{}}.{word}()", None, certain)
        callee = _beside(call, word, function) if word.isidentifier() else None
        if callee is not None and pattern.name.fullmatch(callee) and pattern.operands:
            written.append((word, callee, pattern))
    if not written:
        return None
    if not certain:  # tables list every name that was ever seen: the counterpart is wanted, and used
        written = _counterparts(call, written, function)
        if not written:
            return None
    _, callee, pattern = written[0]
    operand = pattern.operands[0]
    argument = f"{operand}={{}}" if isinstance(operand, str) else "{}"
    return GivingBack(f"{callee}({argument})", None, certain or is_plain(call.func))


@lru_cache(maxsize=256)
def _calls(text: str, callee: str) -> bool:
    return f"{callee}(" in text


def _counterparts(
    call: ast.Call, written: list[tuple[str, str, Pattern]], function: Function
) -> list[tuple[str, str, Pattern]]:
    """The releases that a reader expects of this acquire: those that the file uses, then the natural one."""
    own = callee_text(call).rpartition(".")[2]
    acquire = take_apart(own, ACQUIRE_WORDS)
    if acquire is None:
        return []
    paired = []
    for word, callee, pattern in written:
        release = take_apart(word, RELEASE_WORDS)
        if release is not None and pairs_with(acquire, release) and acquire.affix == release.affix:
            order = NATURAL.get(acquire.verb, ())
            rank = order.index(release.verb) if release.verb in order else len(order)
            used = _calls(function.module.text, callee)
            paired.append((not used, rank, word, callee, pattern))
    return [(word, callee, pattern) for _, _, word, callee, pattern in sorted(paired, key=lambda p: p[:3])]


# Wrappers ---------------------------------------------------------------------------------------------------


def _agreed(
    recogniser: Recogniser,
    wrappers: Sequence[Function],
    function: Function,
    call: ast.Call,
    seen: frozenset[Function],
) -> GivingBack | None:
    """What every wrapper that may be meant would do; where they differ, what a lease does itself."""
    seen |= {*wrappers}
    found = [_through(recogniser, wrapper, function, call, seen) for wrapper in wrappers]
    ways = {way for way in found if way is not None}
    if len(ways) > 1:
        ways = {replace(way, certain=False) for way in ways if way.call.startswith("{")}
    return ways.pop() if len(ways) == 1 else None


def _through(
    recogniser: Recogniser, wrapper: Function, function: Function, call: ast.Call, seen: frozenset[Function]
) -> GivingBack | None:
    """As the wrapper itself would release it, in the words of its caller."""
    rest = recogniser.wrappers[wrapper].rest
    if rest and rest != EACH:
        return None
    inner = [each for each in wrapper.calls if recogniser.source(wrapper, each) is not None]
    ways = {giving_back(recogniser, wrapper, each, seen) for each in inner} - {None}
    way = ways.pop() if len(ways) == 1 else None
    if way is not None and rest:
        way = replace(way, lending=None, each=True)
    if way is None or way.call.startswith("{"):
        return way
    waits, written = ("await ", way.call[6:]) if way.call.startswith("await ") else ("", way.call)
    root, dot, attribute = written.partition(".")
    here = in_callers_words(root, wrapper, function, call) if dot else None
    if here is None:
        return None
    hidden = here != "self" and attribute.startswith("_")
    return replace(way, call=f"{waits}{here}.{attribute}", lending=None, certain=way.certain and not hidden)


# Words ------------------------------------------------------------------------------------------------------


def _beside(call: ast.Call, name: str, function: Function) -> str | None:
    """`name` on the receiver that the acquire was called on; a plain function only where it is visible."""
    if isinstance(call.func, ast.Attribute):
        return f"{ast.unparse(call.func.value)}.{name}"
    module = function.module
    return name if name in module.functions or name in module.imports else None
