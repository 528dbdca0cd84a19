"""A decorator hands every decorated worker function a decode slot."""
import functools
import threading


class DecodeSlots:
    def __init__(self, n):
        self._cond = threading.Condition()
        self._ids = set(range(n))

    def claim(self):
        with self._cond:
            while not self._ids:
                self._cond.wait()
            return self._ids.pop()

    def unclaim(self, slot):
        with self._cond:
            self._ids.add(slot)
            self._cond.notify()


SLOTS = DecodeSlots(32)


def with_slot(fn):
    @functools.wraps(fn)
    def inner(*args, **kwargs):
        slot = SLOTS.claim()  # clean: near miss, decorator with finally
        try:
            return fn(slot, *args, **kwargs)
        finally:
            SLOTS.unclaim(slot)

    return inner


def with_cached_slot(fn):
    memo = {}

    @functools.wraps(fn)
    def inner(key):
        slot = SLOTS.claim()  # leak: a memo hit returns with the slot claimed
        if key in memo:
            return memo[key]
        try:
            memo[key] = fn(slot, key)
            return memo[key]
        finally:
            SLOTS.unclaim(slot)

    return inner


@with_slot
def greedy(slot, logits):
    return slot, max(range(len(logits)), key=logits.__getitem__)


@with_cached_slot
def tokenize(slot, text):
    return [ord(c) for c in text]


def beam(logits, width):
    claimed = []
    try:
        for _ in range(width):
            claimed.append(SLOTS.claim())  # clean: near miss, every one in the list goes back in finally
        order = sorted(range(len(logits)), key=logits.__getitem__)
        return list(zip(claimed, order))
    finally:
        for slot in claimed:
            SLOTS.unclaim(slot)


def speculative(draft, target):
    slot = SLOTS.claim()  # leak: the finally gives back only when something was accepted
    accepted = 0
    try:
        for a, b in zip(draft, target):
            if a != b:
                break
            accepted += 1
        return accepted
    finally:
        if accepted:
            SLOTS.unclaim(slot)
