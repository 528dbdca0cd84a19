# take: grab_bounce()
# give: drop_bounce(X)
# gets: value
import queue

BOUNCE_BYTES = 4 << 20
BOUNCE_COUNT = 8

_bounces = queue.Queue(maxsize=BOUNCE_COUNT)
for _i in range(BOUNCE_COUNT):
    _bounces.put(bytearray(BOUNCE_BYTES))


class BounceTimeout(RuntimeError):
    pass


def grab_bounce(timeout=60.0):
    """A staging bytearray between the NIC reader and the decoder."""
    try:
        return _bounces.get(timeout=timeout)
    except queue.Empty:
        raise BounceTimeout(f"no bounce buffer after {timeout}s, is a decoder stuck?") from None


def drop_bounce(buf):
    if len(buf) != BOUNCE_BYTES:
        raise TypeError("not one of ours")
    _bounces.put_nowait(buf)
