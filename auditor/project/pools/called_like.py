"""Whether a name says that it stands for a certain pool."""

import ast

from auditor.project.code.modules import last_part
from auditor.project.pools.halves import Pair
from auditor.protocols.vocabulary import singular, split

UNSAYING = frozenset({"base", "abstract", "interface", "kv", "cache", "memory", "new", "the"})
"""Words of classes' names by which no pool is told from another thing."""

GUARDS = frozenset({"lock", "mutex", "semaphore", "condition", "event", "queue"})
"""Last words of names that say what a thing is."""


def called_like_pool(receiver: ast.expr, pair: Pair) -> bool:
    """`self.kv_allocator.alloc` is called like a class KVAllocator."""
    while isinstance(receiver, (ast.Subscript, ast.Call)):  # `self.pools[size]`, `get_pool()`
        receiver = receiver.value if isinstance(receiver, ast.Subscript) else receiver.func
    name = last_part(receiver)
    words = {singular(word) for word in split(name)} - {"self", "get"}
    mine = {singular(word) for word in split(pair.name)} - UNSAYING
    if GUARDS & set(split(name)[-1:]) - mine:
        return False  # `semaphore_cleanup_lock` is a lock, and no SemaphoreHandler
    return bool(words & mine)
