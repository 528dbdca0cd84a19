"""Write slots with three states: empty, reserved, committed."""
from dataclasses import dataclass
from enum import Enum, auto


class State(Enum):
    EMPTY = auto()
    RESERVED = auto()
    COMMITTED = auto()


@dataclass
class Slot:
    state: State = State.EMPTY
    payload: bytes = b""


class SlotTable:
    def __init__(self, n):
        self.slots = [Slot() for _ in range(n)]

    def reserve(self):
        for i, slot in enumerate(self.slots):
            if slot.state is State.EMPTY:
                slot.state = State.RESERVED
                return i
        return None

    def commit(self, i, payload):
        slot = self.slots[i]
        slot.payload, slot.state = payload, State.COMMITTED

    def abort(self, i):
        self.slots[i].state = State.EMPTY

    def collect(self):
        for slot in self.slots:
            if slot.state is State.COMMITTED:
                yield slot.payload
                slot.payload, slot.state = b"", State.EMPTY


def enqueue_checked(table, record, serialize, limit):
    i = table.reserve()  # leak: long records leave the slot reserved
    if i is None:
        return False
    payload = serialize(record)
    if len(payload) > limit:
        return False
    table.commit(i, payload)
    return True


def enqueue_or_abort(table, source):
    i = table.reserve()  # clean: committed or aborted
    if i is not None:
        payload = source.poll()
        if payload:
            table.commit(i, payload)
        else:
            table.abort(i)


def is_full(table):
    return table.reserve() is None  # leak: the slot found is left reserved
