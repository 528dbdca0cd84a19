# take: book_bytes(n)
# give: unbook_bytes(n)
# gets: answer
"""Host RAM that prefetched but unconsumed samples may hold, for the whole process."""
import logging
import threading

log = logging.getLogger(__name__)

_ceiling = 8 << 30
_booked = 0
_mutex = threading.Lock()


def set_ceiling(nbytes):
    global _ceiling
    with _mutex:
        _ceiling = int(nbytes)


def book_bytes(nbytes):
    global _booked
    with _mutex:
        after = _booked + nbytes
        if after > _ceiling:
            log.debug("prefetch refused: %d over %d", after, _ceiling)
            return False
        _booked = after
        return True


def unbook_bytes(nbytes):
    global _booked
    with _mutex:
        if nbytes > _booked:
            log.warning("unbooking %d of %d", nbytes, _booked)
        _booked = max(0, _booked - nbytes)
