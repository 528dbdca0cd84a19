class Page:
    def __init__(self, number):
        self.number = number
        self.pins = 0


class PagePins:
    def __init__(self, pages):
        self.pages = {n: Page(n) for n in range(pages)}

    def pin(self, number):
        page = self.pages[number]
        page.pins += 1
        return page

    def unpin(self, page):
        page.pins -= 1


class Node:
    __slots__ = ("page", "prev", "next", "dirty")

    def __init__(self, page):
        self.page = page
        self.prev = None
        self.next = None
        self.dirty = False


class ScanChain:
    def __init__(self, pins):
        self.pins = pins
        self.head = None
        self.tail = None
        self.length = 0
        self.root = pins.pin(0)  # clean: close unpins it

    def advance(self, number):
        node = Node(self.pins.pin(number))  # leak: trim unlinks from the head without unpin
        if self.tail is None:
            self.head = self.tail = node
        else:
            node.prev = self.tail
            self.tail.next = node
            self.tail = node
        self.length += 1

    def trim(self, keep):
        while self.length > keep and self.head is not None:
            node = self.head
            self.head = node.next
            if self.head is None:
                self.tail = None
            else:
                self.head.prev = None
            self.length -= 1

    def close(self):
        node = self.head
        while node is not None:
            self.pins.unpin(node.page)
            node = node.next
        self.head = self.tail = None
        self.length = 0
        self.pins.unpin(self.root)


class UndoStack:
    def __init__(self, pins):
        self.pins = pins
        self.top = None

    def push(self, number):
        node = Node(self.pins.pin(number))  # clean: undo unpins node by node
        node.next = self.top
        self.top = node

    def undo(self):
        node = self.top
        if node is None:
            return None
        self.top = node.next
        self.pins.unpin(node.page)
        return node.page.number

    def abort(self):
        count = 0
        while self.undo() is not None:
            count += 1
        return count
