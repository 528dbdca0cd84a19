# take: P.pluck()
# give: P.thread(X)
# gets: optional
# type: CellChain
from array import array

NIL = -1


class CellChain:
    """Intrusive singly linked free list in one int array: nxt[i] is the free cell after i."""

    def __init__(self, ncells):
        self.nxt = array("i", range(1, ncells + 1))
        if ncells:
            self.nxt[-1] = NIL
        self.head = 0 if ncells else NIL
        self.used = 0

    def pluck(self):
        cell = self.head
        if cell == NIL:
            return None
        self.head = self.nxt[cell]
        self.nxt[cell] = NIL
        self.used += 1
        return cell

    def thread(self, cell):
        self.nxt[cell] = self.head
        self.head = cell
        self.used -= 1
