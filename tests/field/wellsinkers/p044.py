"""Hazard slots: a thread publishes the node it reads so that nobody reclaims it."""
import threading


class HazardSlots:
    def __init__(self, n):
        self._slot = [None] * n
        self._owner = [0] * n
        self._retired = []
        self._mu = threading.Lock()

    def protect(self, node):
        me = threading.get_ident()
        with self._mu:
            i = self._owner.index(0)
            self._owner[i], self._slot[i] = me, node
        return i

    def clear(self, i):
        with self._mu:
            self._slot[i] = None
            self._owner[i] = 0

    def retire(self, node):
        with self._mu:
            self._retired.append(node)
            live = {id(s) for s in self._slot if s is not None}
            self._retired = [n for n in self._retired if id(n) in live]


class LockFreeStack:
    def __init__(self, hazards):
        self.hazards = hazards
        self.top = None

    def pop(self):
        node = self.top
        if node is None:
            return None
        i = self.hazards.protect(node)  # clean: cleared before the node is retired
        self.top = node.next
        value = node.value
        self.hazards.clear(i)
        self.hazards.retire(node)
        return value

    def peek(self):
        i = self.hazards.protect(self.top)  # leak: an empty stack keeps the slot
        if self.top is None:
            return None
        value = self.top.value
        self.hazards.clear(i)
        return value

    def contains(self, value):
        i = self.hazards.protect(self.top)  # clean: cleared in finally
        try:
            node = self.top
            while node is not None and node.value != value:
                node = node.next
            return node is not None
        finally:
            self.hazards.clear(i)


def drop_if_old(stack, age):
    i = stack.hazards.protect(stack.top)  # leak: cleared only when it was old
    if stack.top and stack.top.age > age:
        stack.hazards.clear(i)
        stack.pop()
