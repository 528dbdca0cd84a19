# take: pg_unlink()
# give: pg_link(X)
# gets: value
from array import array

NPAGES = 4096
END = NPAGES          # sentinel: no successor
BUSY = NPAGES + 1     # sentinel: page is in somebody's block table

_next = array("i", list(range(1, NPAGES + 1)))
_head = 0
_nfree = NPAGES


def pg_unlink():
    """Pop the head of the intrusive list."""
    global _head, _nfree
    pg = _head
    if pg == END:
        raise MemoryError("kv pages exhausted")
    _head = _next[pg]
    _next[pg] = BUSY
    _nfree -= 1
    return pg


def pg_link(pg):
    global _head, _nfree
    if _next[pg] != BUSY:
        raise AssertionError("page %d linked twice" % pg)
    _next[pg] = _head
    _head = pg
    _nfree += 1


def pg_free_count():
    return _nfree
