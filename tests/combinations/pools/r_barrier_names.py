# take: claim_group(key)
# give: disclaim_group(key)
# gets: answer
"""Process-group tags. Two subsystems must never rendezvous under the same tag at once."""
import os
import time

_claims = {}
_hooks = []


def on_change(fn):
    _hooks.append(fn)
    return fn


def _fire(event, tag):
    for fn in _hooks:
        fn(event, tag)


def claim_group(tag):
    if tag in _claims:
        return False
    _claims[tag] = (os.getpid(), time.time())
    _fire("claimed", tag)
    return True


def disclaim_group(tag):
    if _claims.pop(tag, None) is None:
        raise KeyError(f"group tag {tag!r} isn't claimed")
    _fire("disclaimed", tag)


def oldest_claim():
    return min(_claims, key=lambda t: _claims[t][1], default=None)
