# take: borrow_segment(n)
# give: return_segment(X)
# gets: optional
"""Dataloader worker -> trainer segments. All sizes share the _SEGMENTS table."""
_LIMIT_BYTES = 512 * 1024 * 1024
_SEGMENTS = []  # dicts: {"mem": bytearray, "out": bool}


def _footprint():
    return sum(len(s["mem"]) for s in _SEGMENTS)


def _evict_idle(until_fits):
    for seg in [s for s in _SEGMENTS if not s["out"]]:
        if _footprint() + until_fits <= _LIMIT_BYTES:
            break
        _SEGMENTS.remove(seg)


def borrow_segment(nbytes):
    for seg in _SEGMENTS:
        if not seg["out"] and len(seg["mem"]) >= nbytes:
            seg["out"] = True
            return seg
    _evict_idle(nbytes)
    if _footprint() + nbytes > _LIMIT_BYTES:
        return None
    seg = {"mem": bytearray(nbytes), "out": True}
    _SEGMENTS.append(seg)
    return seg


def return_segment(seg):
    seg["out"] = False
