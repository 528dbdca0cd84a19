"""Queues and stores, whose methods are called like a pool's: nobody gives back what he got from them."""

from auditor.project.code.modules import Function
from auditor.project.shapes.pool_state import own_parameters
from auditor.protocols.vocabulary import Name, split

PASSING_ON = frozenset({"queue", "mailbox", "channel", "inbox", "outbox"})
"""Of classes so called nobody owes what he got."""


POOL_WORDS = frozenset({"pool", "allocator", "free", "freelist", "arena", "slab"})


QUEUES = frozenset({"queue", "fifo", "lifo", "channel", "stream", "mailbox", "inbox", "pipe"})
"""Words in the names of classes through which things pass."""


def is_store(acquire: Function, name: Name, release: Function) -> bool:
    """`get(key)` and `put(key, value)` are a store's, not a pool's; nobody puts back what a queue handed
    out."""
    if name.verb not in ("get", "take", "fetch", "pop"):
        return False
    words = set(split(acquire.cls.name)) if acquire.cls is not None else set()
    if words & QUEUES and not words & POOL_WORDS:
        return True
    keyed = any("key" in parameter or parameter in ("name", "id") for parameter in own_parameters(acquire))
    return keyed or len(own_parameters(release)) > 1


def passes_on(function: Function, acquiring: Name, releasing: Name) -> bool:
    """`get()` and `put(item)`: what one side puts in the other may keep. Shapes tell whether it is a pool."""
    of_class = {*split(function.cls.name if function.cls else "")}
    weak = acquiring.verb in ("get", "take", "fetch") and releasing.verb in ("put", "push", "give")
    return weak and not of_class & POOL_WORDS
