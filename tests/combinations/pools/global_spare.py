# take: spare_buffer(4096)
# give: stow(X)
# gets: value
# type: object
_SPARE = {}


def spare_buffer(size):
    bucket = _SPARE.get(size)
    if bucket:
        return bucket.pop()
    return bytearray(size)


def stow(buf):
    _SPARE.setdefault(len(buf), []).append(buf)
