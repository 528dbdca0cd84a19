# take: take_buffer(10)
# give: give_buffer(X)
# gets: value
import threading

_lock = threading.Lock()
_free = []


def take_buffer(size):
    with _lock:
        for i, buf in enumerate(_free):
            if len(buf) >= size:
                return _free.pop(i)
    return bytearray(size)


def give_buffer(buf):
    with _lock:
        _free.append(buf)


class Pool: pass
