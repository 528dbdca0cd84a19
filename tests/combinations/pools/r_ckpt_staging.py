# take: stage_claim()
# give: stage_clear(X)
# gets: value
# Staging areas of the async checkpointer, one bit for each; a set bit means vacant.
import threading

N_AREAS = 6
AREA_SIZE = 256 * 1024 * 1024

_mask = (1 << N_AREAS) - 1
_cv = threading.Condition()


def _lowest_bit(m):
    return (m & -m).bit_length() - 1


def stage_claim():
    global _mask
    with _cv:
        while _mask == 0:
            _cv.wait()
        area = _lowest_bit(_mask)
        _mask &= ~(1 << area)
        return area


def stage_clear(area):
    global _mask
    bit = 1 << area
    with _cv:
        if _mask & bit:
            raise RuntimeError(f"area {area} cleared but never claimed")
        _mask |= bit
        _cv.notify()


def stage_offset(area):
    return area * AREA_SIZE
