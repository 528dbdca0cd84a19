"""Document converters chosen by single dispatch, working on leased arenas."""
import functools


class Arenas:
    def __init__(self, count):
        self._empty = [bytearray() for _ in range(count)]

    def claim(self):
        return self._empty.pop() if self._empty else None

    def reclaim(self, arena):
        arena.clear()
        self._empty.append(arena)


class Text(str):
    pass


class Sheet(list):
    pass


@functools.singledispatch
def render(doc, arena, arenas):
    arenas.reclaim(arena)
    return b""


@render.register
def _(doc: Text, arena, arenas):
    arena += doc.encode()
    out = bytes(arena)
    arenas.reclaim(arena)
    return out


@render.register
def _(doc: Sheet, arena, arenas):
    for row in doc:
        arena += ",".join(map(str, row)).encode() + b"\n"
    out = bytes(arena)
    arenas.reclaim(arena)
    return out


@functools.singledispatch
def measure(doc, arena):
    return 0


@measure.register
def _(doc: Text, arena):
    arena += doc.encode()
    return len(arena)


def convert(arenas, doc):
    arena = arenas.claim()  # clean: each implementation of render reclaims
    if arena is None:
        return None
    return render(doc, arena, arenas)


def convert_all(arenas, docs):
    out = []
    for doc in docs:
        arena = arenas.claim()  # leak: an empty document goes on to the next one
        if arena is None:
            break
        if not doc:
            out.append(b"")
            continue
        out.append(render(doc, arena, arenas))
    return out


def length(arenas, doc):
    arena = arenas.claim()  # leak: no implementation of measure reclaims
    return measure(doc, arena) if arena is not None else -1


def length_checked(arenas, doc, limit):
    arena = arenas.claim()  # clean: reclaimed after the measure
    if arena is None:
        return False
    size = measure(doc, arena)
    arenas.reclaim(arena)
    return size <= limit
