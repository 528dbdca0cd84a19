"""The verbs by which pools are recognised: they propose a pair, the bodies decide."""

import re
from dataclasses import dataclass

PAIRS: tuple[tuple[frozenset[str], frozenset[str]], ...] = (
    (frozenset({"allocate", "alloc", "malloc"}), frozenset({"deallocate", "dealloc", "free", "release",
                "recycle"})),
    (frozenset({"acquire", "obtain", "lease", "rent", "claim"}),
     frozenset({"release", "return", "free", "giveback", "recycle", "restore"})),
    (frozenset({"get", "take", "fetch"}), frozenset({"put", "putback", "return", "give", "giveback",
                "release", "free", "recycle", "push"})),
    (frozenset({"pop"}), frozenset({"push", "putback", "return", "giveback"})),
    (frozenset({"borrow", "checkout"}), frozenset({"return", "giveback", "putback", "release", "checkin"})),
    (frozenset({"reserve"}), frozenset({"unreserve", "release", "free", "cancel"})),
    (frozenset({"pin"}), frozenset({"unpin"})),
    (frozenset({"lock"}), frozenset({"unlock"})),
    (frozenset({"inc", "incr", "incref", "increment", "retain", "up", "addref"}),
     frozenset({"dec", "decr", "decref", "decrement", "release", "down", "unref", "deref", "dropref"})),
)  # fmt: skip

COUNTS = frozenset({"inc", "incr", "incref", "increment", "retain", "up", "addref"})
"""Verbs that count one more user of an object."""

MARKS = frozenset({"pin", "lock"})
"""Verbs that mark an object; only their own counterparts end it."""

COUNTING = COUNTS | MARKS
"""Verbs that mark an existing object instead of handing out one."""

WEAK = frozenset({"get", "take", "fetch", "pop", "lock", "pin", "inc", "incr", "increment", "up", "retain",
                  "claim"})  # fmt: skip
"""Verbs so common that only a known class makes them an acquire."""

PREFIXES = frozenset({"try", "batched", "batch", "maybe", "async", "force", "do", "bulk", "multi", "safe",
                      "raw", "new",
                      "ref", "count", "pre"})  # fmt: skip

ACQUIRE_WORDS = frozenset().union(*(acquire for acquire, _ in PAIRS))
RELEASE_WORDS = frozenset().union(*(release for _, release in PAIRS)) | {
    "unref",
    "evict",
    "drop",
    "dispose",
    "close",
}

LEASE_METHODS = frozenset(
    {"release", "free", "close", "ref_count_down", "dec_ref", "decref", "dispose", "recycle", "give_back",
     "return_to_pool", "deallocate", "unref", "release_memory"}
)  # fmt: skip
"""Methods of a lease that end it."""

RELEASING = re.compile(
    r"_*(?:(?:try|batched|batch|maybe|safe|force|do|async|bulk|delayed|deferred)_)*"
    r"(?:de_?alloc\w*|free(?:_\w+)?|release(?:_\w+)?|give_?back\w*|put_?back\w*|return_(?:to_)?\w*(?:pool|buffer|block|tensor|lease|slot)\w*"
    r"|recycle\w*|unref\w*|dec_?ref\w*|reclaim\w*)"
)
"""Names of functions that give back what they are given, where nothing more is known of them."""

STORING = frozenset(
    {"append", "appendleft", "add", "insert", "extend", "push", "put", "put_nowait", "enqueue",
     "submit", "schedule", "store", "save", "register", "set", "set_result", "update", "commit", "attach",
     "assign",
     "emplace", "offer", "publish", "write_back", "heappush", "setattr", "create_task", "ensure_future",
     "run_coroutine_threadsafe",
     "call_soon", "call_soon_threadsafe", "call_later", "run_in_executor", "apply_async", "start_soon",
     "spawn", "finalize", "callback",
     "push_async_callback", "enter_context", "enter_async_context", "add_done_callback", "setdefault",
     "put_async", "Thread", "Timer", "partial"}
)  # fmt: skip
"""Methods that keep what they are given, where nothing more is known of them."""

KEEPING = re.compile(
    r"_*(?:append|extend|add|set|store|register|attach|insert|push|enqueue|assign|save|record|track)_\w+"
)
"""Longer names of such methods: `extend_kv_cache`, `register_blocks`."""


@dataclass(frozen=True, slots=True)
class Name:
    """A method's name taken apart: its verb, and the words that say of what."""

    verb: str
    affix: frozenset[str]

    @property
    def kind(self) -> str:
        """`pin` or `lock` for what only its own counterpart ends, empty for the rest."""
        verb = self.verb.removeprefix("un")
        return verb if verb in MARKS else ""


def split(name: str) -> list[str]:
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    words = [word for word in spaced.split("_") if word]
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] + word in (
            "giveback",
            "putback",
            "checkout",
            "checkin",
            "addref",
            "dropref",
        ):
            joined[-1] += word
        else:
            joined.append(word)
    return joined


def take_apart(name: str, verbs: frozenset[str]) -> Name | None:
    """`get_new_blocks` is `get` of `blocks`; None where no verb leads the name."""
    words = split(name)
    for index, word in enumerate(words[:4]):
        if word in verbs:
            rest = words[:index] + words[index + 1 :]
            return Name(word, frozenset(_singular(word) for word in rest if word not in PREFIXES))
        if word not in PREFIXES:
            return None
    return None


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") else word


def pairs_with(acquire: Name, release: Name) -> bool:
    for acquiring, releasing in PAIRS:
        if acquire.verb in acquiring and release.verb in releasing:
            return not acquire.affix or not release.affix or bool(acquire.affix & release.affix)
    return False
