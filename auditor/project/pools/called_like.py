"""Whether a name, or what is given back to it, says that it stands for a certain pool."""

import ast
from collections import OrderedDict, deque
from collections.abc import Callable, Set

from auditor.project.code.asked_of import is_called_like, listing
from auditor.project.code.calls import COMMON_NAMES
from auditor.project.code.modules import Function, Module, last_part
from auditor.project.pools.halves import Pair
from auditor.protocols.vocabulary import ACQUIRE_WORDS, GUARDS, WEAK, singular, split, take_apart
from auditor.source.nodes import walk

UNSAYING = frozenset({"base", "abstract", "interface", "kv", "cache", "memory", "new", "the"})
"""Words of classes' names by which no pool is told from another thing."""

SHORTEST = 2
"""Letters by which a word is known."""

OF_CONTAINERS = COMMON_NAMES.union(*(map(dir, (list, set, dict, OrderedDict, deque))))
"""Names that say nothing of who is asked."""


def name_of(receiver: ast.expr) -> str:
    """`arena` of `self.arena`, of `arena[size]` and of `state["arena"]`."""
    while isinstance(receiver, (ast.Subscript, ast.Call)) and not _key_of(receiver):
        receiver = receiver.value if isinstance(receiver, ast.Subscript) else receiver.func
    return _key_of(receiver) or last_part(receiver)  # not of `self.pools[size]`, `get_pool()`


def called_like_pool(receiver: ast.expr, pair: Pair) -> bool:
    """`self.kv_allocator.alloc` is called like a class KVAllocator."""
    name = name_of(receiver)
    words = {singular(word) for word in split(name)} - {"self", "get"}
    mine = {singular(word) for word in split(pair.name)} - UNSAYING
    if GUARDS & set(split(name)[-1:]) - mine:
        return False  # `semaphore_cleanup_lock` is a lock, and no SemaphoreHandler
    return bool(words & mine) or any(_is_short_for(word, whole) for word in words for whole in mine)


def _is_short_for(word: str, whole: str) -> bool:
    """`conn` of a ConnectionPool, `evs` of an EventPool."""
    word = word.removesuffix("s")
    return whole.isalpha() and SHORTEST <= len(word) < len(whole) and whole.startswith(word)


def _key_of(receiver: ast.expr) -> str:
    """`pool` of `state["pool"]`."""
    match receiver:
        case ast.Subscript(value=ast.Name(), slice=ast.Constant(value=str(key))):
            return key
    return ""


def says_enough(receiver: ast.expr, method: Function, pair: Pair) -> bool:
    """The receiver is called like the pool, also by the one word `cache` of a `RadixCache`; or the method
    says what it does: `library.borrow()`."""
    if called_like_pool(receiver, pair) or take_apart(method.name, ACQUIRE_WORDS - WEAK) is not None:
        return True
    return method.cls is not None and is_called_like(receiver, method.cls)


def given_back_near(function: Function, receiver: ast.expr, pair: Pair) -> bool:
    """Whether something is given back to that receiver here, or by another method of the object whose field
    it is: what is taken out of `self.lists[size]` may go back to `self.lists[item.size]`. Where the name of
    the way back is no common one, it may be another such pool: `self.old.close_row(row)`. What is lent may
    have the way back itself: `segment.seal()`."""
    ways_back = {half.function.name for half in pair.releases}
    of_lent = {half.function.name for half in pair.releases if half.function.cls is not pair.owner}
    telling = {name for name in ways_back if len(split(name)) > 1}
    asked = ast.unparse(listing(receiver))
    of_own = asked.startswith(f"{function.owner}.") and function.cls is not None
    near = [function, *(function.cls.methods.values() if of_own and function.cls else ())]
    root = next((node.id for node in walk(receiver) if isinstance(node, ast.Name)), "")
    if function.cls is None and root:  # `unsubscribe(tramps, slots)` beside it
        near += [each for each in function.module.by_node.values() if root in each.parameters]
    return asked_for_both(function.module, receiver, pair) or any(
        isinstance(other.func, ast.Attribute)
        and other.func.attr in ways_back
        and (other.func.attr in telling | of_lent or ast.unparse(listing(other.func.value)) == asked)
        for each in near
        for other in each.calls
    )


def written_for(function: Function, target: Function, pair: Pair) -> bool:
    """Whether another class of the pool's own file asks what is lent to go back, all of it by names that no
    container has: `self.small.carve(n)` beside `piece.uncarve()` and a class `Arena` means that one."""
    own = {half.function.cls for half in (*pair.acquires, *pair.releases)}
    of_lent = {half.function.name for half in pair.releases if half.function.cls is not pair.owner}
    if function.module is not target.module or function.cls in own or target.name in OF_CONTAINERS:
        return False
    others = (each for each in function.module.by_node.values() if each.cls not in own)
    back = of_lent - OF_CONTAINERS
    return any(last_part(call.func) in back for each in others for call in each.calls)


def asked_for_both(
    module: Module, receiver: ast.expr, pair: Pair, fits: Callable[[ast.Call], bool] = lambda call: True
) -> bool:
    """`arenas.draw()` in a file where somebody asks for `self.arenas.draw()`, and gives back to
    `self.arenas.stow(arena)`: what goes by one name there is one kind of thing. `fits` is asked of the
    calls."""
    name = last_part(listing(receiver))
    takes, back = ({half.function.name for half in side} for side in (pair.acquires, pair.releases))
    if not name or not any(f"{name}.{each}(" in module.text for each in back):
        return False
    return any(
        _asks(function, name, takes, fits) and _asks(function, name, back, fits)
        for function in module.by_node.values()
    )


def names_an_amount(call: ast.Call) -> bool:
    """It is told one thing, and no mere yes or no."""
    given = call.args[0] if len(call.args) == 1 and not call.keywords else None
    return given is not None and not (isinstance(given, ast.Constant) and isinstance(given.value, bool))


def _asks(function: Function, name: str, methods: Set[str], fits: Callable[[ast.Call], bool]) -> bool:
    return any(
        isinstance(call.func, ast.Attribute) and last_part(listing(call.func.value)) == name and fits(call)
        for method in methods
        for call in function.calling(method)
    )
