# take: take_page()
# give: put_page(X)
# gets: value
import threading

PAGE_BYTES = 64 * 1024
_SPARE = []
_SPARE_MAX = 128
_LOCK = threading.Lock()
STATS = {"reused": 0, "created": 0, "dropped": 0}


def _fresh():
    STATS["created"] += 1
    return bytearray(PAGE_BYTES)


def take_page():
    with _LOCK:
        if _SPARE:
            STATS["reused"] += 1
            return _SPARE.pop()
        return _fresh()


def put_page(page):
    if len(page) != PAGE_BYTES:
        raise ValueError("foreign page")
    with _LOCK:
        if len(_SPARE) < _SPARE_MAX:
            _SPARE.append(page)
        else:
            STATS["dropped"] += 1
