"""Module-level pool of translation memories and plain functions around it."""
import re

_IDLE = []
_BUSY = {}


def setup(memories):
    _IDLE.extend(memories)


def borrow_memory(language):
    if not _IDLE:
        return None
    memory = _IDLE.pop()
    _BUSY[id(memory)] = language
    return memory


def hand_in(memory):
    _BUSY.pop(id(memory), None)
    _IDLE.append(memory)


def memory_for(text, *, default="en"):
    found = re.match(r"\[(\w\w)\]", text)
    return borrow_memory(found.group(1) if found else default)  # clean: handed to the caller


def lookup(memory, segment):
    hits = memory.search(segment)
    return max(hits, key=lambda hit: hit.score, default=None)


def translate(text):
    memory = memory_for(text)  # clean: handed in
    if memory is None:
        return text
    parts = [lookup(memory, part) for part in text.split(". ")]
    hand_in(memory)
    return ". ".join(hit.target if hit else "" for hit in parts)


def first_hit(text):
    memory = memory_for(text)  # leak: no hit returns with the memory borrowed
    if memory is None:
        return None
    hit = lookup(memory, text)
    if hit is None:
        return None
    target = hit.target
    hand_in(memory)
    return target


def learn(pairs):
    learned = 0
    memory = None
    for source, target in pairs:
        if memory is None:
            memory = memory_for(source)  # clean: borrowed once, handed in after the loop
            if memory is None:
                return 0
        memory.add(source, target)
        learned += 1
    if memory is not None:
        hand_in(memory)
    return learned


def learn_each(pairs):
    memory = None
    for source, target in pairs:
        memory = memory_for(source)  # leak: each pair borrows another, only the last is handed in
        if memory is not None:
            memory.add(source, target)
    if memory is not None:
        hand_in(memory)
    return len(pairs)


def language_count():
    return len(set(_BUSY.values()))
