"""The verbs by which pools are recognised: they propose a pair, the bodies decide."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

PAIRS: tuple[tuple[frozenset[str], frozenset[str]], ...] = (
    (frozenset({"allocate", "alloc", "malloc"}), frozenset({"deallocate", "dealloc", "free", "mfree",
                "release", "recycle", "return", "giveback", "putback", "handback", "reclaim"})),
    (frozenset({"acquire", "obtain", "lease", "rent", "claim", "grab"}),
     frozenset({"release", "return", "free", "giveback", "putback", "handback", "recycle", "restore",
                "unclaim", "revoke", "discard", "relinquish", "surrender"})),
    (frozenset({"get", "take", "fetch"}), frozenset({"put", "putback", "return", "give", "giveback",
                "handback", "release", "free", "recycle", "push", "refund"})),
    (frozenset({"take", "fetch"}), frozenset({"restore"})),  # not of `get_cache`: `restore_caches(saved)`
    (frozenset({"pop"}), frozenset({"push", "putback", "return", "giveback"})),
    (frozenset({"borrow", "checkout"}), frozenset({"return", "giveback", "putback", "handback", "release",
                "checkin", "discard", "repay", "restore"})),
    (frozenset({"reserve"}), frozenset({"unreserve", "release", "free", "cancel", "return", "giveback",
                "rollback"})),
    (frozenset({"pin"}), frozenset({"unpin"})),
    (frozenset({"lock"}), frozenset({"unlock"})),
    (frozenset({"inc", "incr", "incref", "increment", "retain", "up", "addref"}),
     frozenset({"dec", "decr", "decref", "decrement", "release", "down", "unref", "deref", "dropref",
                "removeref"})),
)  # fmt: skip

COUNTS = frozenset({"inc", "incr", "incref", "increment", "retain", "up", "addref"})
"""Verbs that count one more user of an object."""

MARKS = frozenset({"pin", "lock"})
"""Verbs that mark an object; only their own counterparts end it."""

COUNTING = COUNTS | MARKS
"""Verbs that mark an existing object instead of handing out one."""

WEAK = frozenset({"get", "take", "fetch", "pop", "lock", "pin", "inc", "incr", "increment", "up", "retain",
                  "grab"})  # fmt: skip
"""Verbs so common that only a known class makes them an acquire."""

PREFIXES = frozenset({"try", "batched", "batch", "maybe", "async", "force", "do", "bulk", "multi", "safe",
                      "raw", "new",
                      "ref", "count", "pre"})  # fmt: skip

PLAIN = frozenset(
    {
        "alloc",
        "allocate",
        "malloc",
        "acquire",
        "reserve",
        "borrow",
        "free",
        "release",
        "dealloc",
        "deallocate",
    }
)
"""Verbs that may follow what they are about: `kv_alloc`, `slot_release`."""

ASKING = frozenset(
    {"is", "has", "can", "could", "should", "may", "need", "needs", "num", "get", "set", "on", "no", "total",
     "max", "min", "check", "test", "log", "before", "after", "post", "auto", "until", "wait", "with",
     "without", "to", "mark", "not", "unset", "handle", "estimate", "compute", "compile", "emit", "trace",
     "print"}
)  # fmt: skip
"""First words that make a question, a number or a switch of what follows."""

POOLS = frozenset({"pool", "allocator"})
"""Last words of names that say what a thing is."""

GUARDS = frozenset({"lock", "mutex", "semaphore", "condition", "event", "queue"})
"""Last words of names of what guards other things, and is none of them: `turnstile_lock`."""

SETTLING = frozenset({"commit", "confirm", "settle", "complete", "finalize", "publish"})
"""Verbs that end a reservation the other way: what was reserved is used, and nothing is owed any more."""

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
     "return_to_pool", "deallocate", "unref", "release_memory", "revoke", "relinquish", "surrender"}
)  # fmt: skip
"""Methods of a lease that end it."""

RELEASING = re.compile(
    r"_*(?:(?:try|batched|batch|maybe|safe|force|do|async|bulk|delayed|deferred)_)*"
    r"(?:de_?alloc\w*|free(?:_\w+)?|release(?:_\w+)?|(?:give|put|hand)_?back\w*|return_(?:to_)?\w*(?:pool|buffer|block|tensor|lease|slot)\w*"
    r"|recycle\w*|unref\w*|dec_?ref\w*|reclaim\w*)"
)
"""Names of functions that give back what they are given, where nothing more is known of them."""

REMOVING = re.compile(
    r"_*(?:try|safe|safely|force|maybe)?_*(?:rm|remove|delete|clean|cleanup)_?\w*?(?:dirs?|tree|folder|directory)"
)
"""Names of functions that remove a directory which they are given."""

STORING = frozenset(
    {"append", "appendleft", "add", "insert", "extend", "push", "put", "put_nowait", "enqueue",
     "submit", "schedule", "store", "save", "register", "set", "set_result", "update", "commit", "attach",
     "assign",
     "emplace", "offer", "publish", "write_back", "heappush", "setattr", "create_task", "ensure_future",
     "run_coroutine_threadsafe",
     "call_soon", "call_soon_threadsafe", "call_later", "run_in_executor", "apply_async", "start_soon",
     "spawn", "finalize", "callback",
     "push_async_callback", "enter_context", "enter_async_context", "add_done_callback", "setdefault",
     "put_async", "Thread", "Timer", "partial", "addHandler"}
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


RUN_TOGETHER = {"getconn": ("get", "conn"), "putconn": ("put", "conn"), "getresource": ("get", "resource")}
"""Well-known methods of pools that are written as one word."""


TWO_WORDS = frozenset({
    "give_back", "put_back", "hand_back", "take_back", "send_back", "bring_back", "check_out",
    "check_in", "hand_out", "hand_in", "give_out", "take_in", "let_go", "log_in", "log_out", "sign_in",
    "sign_out", "add_ref", "drop_ref", "remove_ref"
})  # fmt: skip
JOINED = {words.replace("_", ""): words for words in sorted(TWO_WORDS)}
"""Verbs that are written as one word or as two, by the one."""


@lru_cache(maxsize=1 << 14)
def split(name: str) -> tuple[str, ...]:
    """The words of a name, small: of `KVRing` "kv" and "ring". A project asks of few names many times."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    words = [word for each in spaced.split("_") if each for word in RUN_TOGETHER.get(each, (each,))]
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] + word in JOINED:
            joined[-1] += word
        else:
            joined.append(word)
    return tuple(joined)


def take_apart(name: str, verbs: frozenset[str]) -> Name | None:
    """`get_new_blocks` is `get` of `blocks`, `slot_alloc` is `alloc` of `slot`; None where no verb leads."""
    words = split(name)
    for index, word in enumerate(words[:4]):
        if word in verbs:
            rest = words[:index] + words[index + 1 :]
            return Name(word, frozenset(singular(word) for word in rest if word not in PREFIXES))
        of_something = index == 0 and len(words) > 1 and words[1] in verbs & PLAIN and word not in ASKING
        if word not in PREFIXES and not of_something:
            return None
    return None


def singular(word: str) -> str:
    """`slots` without its `s`."""
    return word[:-1] if len(word) > 3 and word.endswith("s") else word


def pairs_with(acquire: Name, release: Name) -> bool:
    for acquiring, releasing in PAIRS:
        if acquire.verb in acquiring and release.verb in releasing:
            return not acquire.affix or not release.affix or bool(acquire.affix & release.affix)
    return False


HANDING_OUT = frozenset({
    "take", "pick", "grab", "draw", "pull", "hire", "summon", "issue", "grant", "lend", "borrow",
    "lease", "rent", "book", "claim", "mint", "assign", "admit", "allot", "carve", "engage", "recruit",
    "seize", "obtain", "acquire", "reserve", "dispense", "consume", "spend", "deduct", "charge",
    "debit", "occupy", "checkout", "handout", "allocate", "alloc", "next", "request", "secure", "place",
    "select", "provide", "loan", "giveout", "enlist", "enroll", "expose", "seat", "park", "hand"
})  # fmt: skip
TAKING_BACK = frozenset({
    "return", "give", "giveback", "putback", "handback", "takeback", "sendback", "bringback", "handin",
    "letgo", "drop", "dismiss", "restore", "reclaim", "revoke", "retire", "surrender", "relinquish",
    "redeem", "refund", "repay", "cancel", "vacate", "discharge", "absorb", "merge", "recycle",
    "release", "free", "reinstate", "credit", "replenish", "withdraw", "expel", "banish", "burn",
    "fire", "checkin", "quit", "leave", "abort", "forfeit", "yield", "restock", "accept",
    "regain", "takein", "unpark"
})  # fmt: skip

UNDOING: tuple[tuple[frozenset[str], frozenset[str]], ...] = (
    (HANDING_OUT, TAKING_BACK),
    (frozenset({"lease"}), frozenset({"end"})),
    (frozenset({"lease", "borrow", "take", "rent", "hire", "fetch", "grab", "pick", "claim", "seize"}),
     frozenset({"park", "stow", "shelve", "rack"})),
    (frozenset({"begin", "start", "enter", "open", "join"}),
     frozenset({"end", "finish", "stop", "leave", "quit", "exit", "done", "close", "seal", "abort",
                "complete", "cancel", "part", "terminate"})),
    (frozenset({"create", "spawn", "make", "new"}),
     frozenset({"destroy", "release", "free", "reap", "kill", "retire", "dismiss", "drop", "discard"})),
    (frozenset({"attach", "connect", "join"}), frozenset({"detach", "disconnect", "leave"})),
    (frozenset({"hold", "use", "keep", "park"}),
     frozenset({"release", "vacate", "drop", "letgo", "done"})),
    (frozenset({"hold", "earmark"}), frozenset({"cancel", "void", "refund"})),
    (frozenset({"login", "logon", "signin", "dock", "board"}),
     frozenset({"logout", "logoff", "signout", "disembark"})),
    (frozenset({"down", "decr", "decrement"}), frozenset({"up", "incr", "increment"})),
    (frozenset({"freeze"}), frozenset({"thaw", "unfreeze"})),
    (frozenset({"suspend", "pause", "block"}), frozenset({"resume", "unpause", "unblock"})),
)  # fmt: skip
"""Verbs that undo others, where the bodies do so, too; of the rest `un`, `de` and `dis` tell."""

CONVERTING = frozenset({
    "activate", "code", "compile", "compress", "escape", "flatten", "fold", "folding", "freeze", "fuse",
    "init", "merge", "normalise", "normalize", "pack", "pad", "patchify", "permute", "quantize", "quote",
    "scale", "serialise", "serialize", "set", "shape", "shard", "shuffle", "sort", "squeeze", "stack",
    "swizzle", "tokenize", "window", "windowed", "wrap", "zip"
})  # fmt: skip
"""Verbs whose opposite changes a thing back, and gives nothing back."""


def undoes(release: str, acquire: str) -> bool:
    """`untake` and `take`, `deregister_region` and `register_region`, `close_lane` and `open_lane`,
    `end_lease` and `lease_lane`."""
    second = _without_prefixes(release)
    if not _may_undo(second):
        return False  # most names of a class, and each is asked about every other
    first = _without_prefixes(acquire)
    if not first:
        return False
    if (*first[:-1], "out") == second and first[-1] == "in":
        return True  # `go_in` and `go_out`
    verb, undoing = first[0], second[0]
    opposite = _negates(undoing, verb) or any(verb in some and undoing in others for some, others in UNDOING)
    about, other = ({singular(word) for word in words[1:]} - {verb} for words in (first, second))
    return opposite and (not about or not other or bool(about & other))


def negates(release: str, acquire: str) -> bool:
    """`uncarve` and `carve`: nothing but a pair is called so."""
    return undoes(release, acquire) and _negates(_without_prefixes(release)[0], _without_prefixes(acquire)[0])


def _negates(undoing: str, verb: str) -> bool:
    return verb not in CONVERTING and undoing in ("un" + verb, "de" + verb, "dis" + verb)


@lru_cache(maxsize=1 << 14)
def _without_prefixes(name: str) -> tuple[str, ...]:
    """`try_take` takes; `new` and the like may be what it is about."""
    words = split(name)
    return words[1:] if len(words) > 1 and words[0] in ("try", "maybe", "async", "do", "force") else words


_FREEZING = re.compile(
    r"_*(?:un)?freeze_\w*(?:back_?bone|encoder|decoder|model|layer|param|weight|norm|embed|tower|expert)"
)
"""What keeps parts of a model from being trained, or no longer, of which many a file has both."""

UNDOERS = frozenset().union(*(others for _, others in UNDOING))
UNDONE = frozenset().union(*(some for some, _ in UNDOING))


def some_undo_others(names: Iterable[str]) -> bool:
    """Whether the names of any two say that one undoes the other."""
    known = [name for name in names if not name.startswith("__") and not _FREEZING.match(name)]
    undoing = [name for name in known if _may_undo(_without_prefixes(name))]
    return any(undoes(one, other) for one in undoing for other in known)


@lru_cache(maxsize=1 << 14)
def _may_undo(words: tuple[str, ...]) -> bool:
    return bool(words) and (
        words[0] in UNDOERS or words[0].startswith(("un", "de", "dis")) or words[-1] == "out"
    )


EITHER_WAY = frozenset({"signin", "signout", "book", "loan"})
"""Who has signed in signs out, and what was signed out is signed in again: the bodies say which."""


def ends(release: str, acquire: str) -> bool:
    """Whether the names alone say that one gives back what the other takes."""
    if not EITHER_WAY.isdisjoint(split(release)[:1]) and not EITHER_WAY.isdisjoint(split(acquire)[:1]):
        return False
    acquiring, releasing = take_apart(acquire, ACQUIRE_WORDS), take_apart(release, RELEASE_WORDS)
    named = acquiring is not None and releasing is not None and pairs_with(acquiring, releasing)
    return named or undoes(release, acquire)
