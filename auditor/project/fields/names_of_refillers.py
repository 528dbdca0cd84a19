"""What the names of methods say of whether there is a lease already where they put one."""

import re

from auditor.protocols.vocabulary import split

AGAIN = (
    r"re_?(?:open|start|boot|send|pin|draft|hold|dispatch|connect|publish|new|place|load|build|size|fill|try|bind|seat"
    r"|map|locate|alloc\w*|assign|generate|run|do|stage|capture|base|seed|join|launch|target|fork|post|write|encode"
    r"|plan|draw|set|fresh|init\w*|create|make|acquire|attach|register|reserve|warm|grow|pack|submit|lock|fetch|spawn"
    r"|arm|begin|issue|compile|compute|shard|scale|route|link|match|index|home)"
)
"""Done a second time."""

CHANGING = (
    r"seek|rotate|roll(?:_?over)?(?!_?back)|extend|widen|expand|grow|enlarge|shrink|compact|condense|heal|upgrade|defrag\w*|change|switch|redo"
    r"|fast_forward|override|overwrite|exchange|swap(?=_(?!in(?:_|$)|out(?:_|$)))"
)
"""Done to what is there."""

OPENED_AGAIN = re.compile(
    r"_*re_?(?:open|start|boot|connect|init\w*|launch|spawn|attach|acquire|lock|join|create|make|run|arm|load)(?:_|$)"
)
"""Methods that may be called when the first one has been ended, and an empty shell is left."""

MOVING = re.compile(r"_*(?:migrate|promote|demote)(?:_|$)")
"""Done to an object that has been there for a while; tables are those of the place where it comes to."""

FOLLOWING = re.compile(rf"_*(?:{AGAIN}|{CHANGING})(?:_|$)")
"""Methods that are called when the first lease has been there for a while."""

COMING_BACK = re.compile(rf"_*(?:swap|page|move)_(?:in|out)(?:_|$)|{MOVING.pattern}")
"""Methods of which one undoes the other, in whatever order they are called."""

BROUGHT_IN = re.compile(r"_*(?:swap|page|move)_in(?:_|$)")
"""Methods for what was put out before, and is not there."""

NEW = frozenset(
    {"new", "fresh", "next", "other", "copy", "clone", "child", "replacement", "target", "dst", "to"}
)
"""Words in the names of what comes in the old one's place."""


LATEST = frozenset({"newest", "latest", "freshest"})
"""Words in the names of fields and tables of which it is said that the next one takes the place of this."""

LETTING_IN = frozenset({"admit", "enter", "resume", "schedule", "activate", "wake"})
"""What is done again to those who have been let out in between."""

PREPARING = re.compile(
    r"_*(?:pre_?(?:fetch|load|heat|stage|view|allocate|fill)|warm|peek|mark|capture|snapshot|publish|enable"
    r"|read_?back|speculate|hint|remember|install|set(?!_(?:out|up|off|in|aside)(?:_|$)))(?:_|$)"
)
"""What is done ahead, or on the side, as often as somebody thinks of it, undone or not."""

EACH_STEP = re.compile(r"_*(?:prepare|poll|step|tick|refresh|observe)(?:_|$)")
"""What is done over and over until the object is closed."""

AROUND = (
    ("before", "after"),
    ("pre", "post"),
    ("dispatch", "combine"),
    ("post", "complete"),
    ("post", "wait"),
)
"""First words of methods that are called around a step."""


ANSWERED = (
    ("enable", "disable"),
    ("campaign", "resign"),
    ("offload", "onload"),
    ("park", "unpark"),
    ("suspend", "resume"),
    ("arm", "disarm"),
)
"""First words of methods of which the second undoes the first, and comes before the first comes again."""

TOLD = frozenset(
    {"request", "begin", "start", "open", "connect", "enter", "attach", "accept", "up", "press", "subscribe"}
)
"""Words of handlers: `on_request` is told of what `on_response` is told the end of."""

SENDING = frozenset({"send", "transmit", "submit", "ask", "call", "request", "issue"})
ARRIVED = frozenset(
    {"ack", "acked", "reply", "response", "answer", "sent", "delivered", "completion", "complete", "done"}
)
"""What is sent under a number, and what is heard of it: `on_ack(seq)`."""


def is_answered(name: str, ending: str) -> bool:
    """`enable()` and `disable()`, `on_request()` and `on_response()`, `send(seq)` and `on_ack(seq)`."""
    words, others = split(name), split(ending)
    if not words or not others:
        return False
    if others[0] == "on":
        heard = words[0] == "on" and not TOLD.isdisjoint(words[1:])
        return heard or (words[0] in SENDING and not ARRIVED.isdisjoint(others[1:]))
    return (words[0], others[0]) in ANSWERED and words[1:] == others[1:]


FORWARD = frozenset({"forward", "fwd"})
BACKWARD = frozenset({"backward", "bwd", "grad", "dgrad", "wgrad"})
"""Words of the passes through a layer, of which the second needs what the first has kept."""


def in_turns(name: str, ending: str) -> bool:
    """`before_step` and `after_step`: neither is called twice in a row."""
    words, others = split(name), split(ending)
    return bool(words) and bool(others) and (words[0], others[0]) in AROUND and words[1:] == others[1:]


def goes_forward(name: str, ending: str) -> bool:
    """`forward_split`, whose `wgrad` comes before the next one."""
    return not FORWARD.isdisjoint(split(name)) and not BACKWARD.isdisjoint(split(ending))


BEGUN = (("begin", "end"), ("begin", "finish"), ("start", "stop"), ("start", "finish"), ("open", "close"))


def begins_what_ends(name: str, ending: str) -> bool:
    """`begin_pass` and `end_pass`, `start` and `stop`."""
    words, others = split(name), split(ending)
    return bool(words) and bool(others) and (words[0], others[0]) in BEGUN and words[1:] == others[1:]


def is_the_new_one(name: str) -> bool:
    """`replace(request, fresh)`: an object so named has not been there before."""
    return not NEW.isdisjoint(split(name))


def keeps_the_latest(field: str) -> bool:
    """`self.newest[key] = message`, `self.latest = frame`"""
    return not LATEST.isdisjoint(split(field))


def follows_another(name: str, keyed: bool) -> bool:
    """A method so named is called when there is one; `keyed`: of what it puts into a table."""
    words = split(name)
    said = words[-1:] in (("again",), ("anew",), ("retry",)) and LETTING_IN.isdisjoint(words[:1])
    again = FOLLOWING.match(name) is not None or said
    return again or (not keyed and MOVING.match(name) is not None)
