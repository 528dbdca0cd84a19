# take: page_new()
# give: page_unref(X)
# gets: optional
"""Copy-on-write pages; arrays instead of objects, there are a million of them."""
from array import array

TOTAL = 1 << 16

refs = array("H", bytes(2 * TOTAL))
stack = array("I", range(TOTAL))
sp = TOTAL


def page_new():
    global sp
    if not sp:
        return None
    sp -= 1
    p = stack[sp]
    refs[p] = 1
    return p


def page_ref(p):
    refs[p] += 1


def page_unref(p):
    global sp
    if refs[p] == 0:
        raise ValueError("unref of free page %d" % p)
    refs[p] -= 1
    if refs[p] == 0:
        stack[sp] = p
        sp += 1
