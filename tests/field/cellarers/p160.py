"""Hazard slots: a reader protects a node, writers retire nodes nobody protects."""
import threading


class HazardDomain:
    def __init__(self, slots=64):
        self.slots = [None] * slots
        self.retired = []
        self._lock = threading.Lock()

    def protect(self, node):
        with self._lock:
            i = self.slots.index(None)
            self.slots[i] = node
        return i

    def clear(self, i):
        self.slots[i] = None

    def retire(self, node):
        self.retired.append(node)
        live = {id(n) for n in self.slots if n is not None}
        for n in [n for n in self.retired if id(n) not in live]:
            self.retired.remove(n)
            n.reclaim()


class SkipNode:
    def __init__(self, key, value, nxt=None):
        self.key, self.value, self.next = key, value, nxt

    def reclaim(self):
        self.value = self.next = None


class LinkedMap:
    def __init__(self, domain, head):
        self.domain = domain
        self.head = head

    def first(self):
        hp = self.domain.protect(self.head)  # clean: cleared in finally
        try:
            return self.head.key, self.head.value
        finally:
            self.domain.clear(hp)

    def get(self, key):
        node = self.head
        while node is not None:
            hp = self.domain.protect(node)  # leak: the found value is returned with the slot set
            if node.key == key:
                return node.value
            node = node.next
            self.domain.clear(hp)
        return None

    def length(self):
        n, node = 0, self.head
        while node is not None:
            hp = self.domain.protect(node)  # clean: cleared in each step
            n += 1
            node = node.next
            self.domain.clear(hp)
        return n

    def touch_head(self):
        self.domain.protect(self.head)  # leak: the slot's index is dropped
        self.head.value = self.head.value or 0
