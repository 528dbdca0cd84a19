"""One upload: parts are filled, sent and confirmed one after another."""
import hashlib
import time
from collections import deque
from dataclasses import dataclass, field

from .credit import ChunkTable, Credit


@dataclass
class Part:
    number: int
    row: int
    credit: int
    length: int = 0
    etag: str = ""
    sent_at: float = field(default_factory=time.time)


class Store:
    """The remote side; put_part returns an etag, or an empty string when the part was refused."""

    def __init__(self):
        self.objects = {}
        self.parts = {}

    def put_part(self, key, number, data):
        if not data:
            return ""
        self.parts[key, number] = bytes(data)
        return hashlib.md5(data).hexdigest()

    def complete(self, key, numbers):
        self.objects[key] = b"".join(self.parts.pop((key, n)) for n in numbers)


class Upload:
    def __init__(self, store: Store, credit: Credit, table: ChunkTable, key: str):
        self.store = store
        self.credit = credit
        self.table = table
        self.key = key
        self.waiting = deque()
        self.confirmed = []
        self.next_number = 1

    def add(self, data):
        """Queues a part; False when there is no room for it at the moment."""
        row = self.table.grab()  # leak: with the credit refused the row stays taken
        if row < 0:
            return False
        amount = self.credit.draw_if(len(data))  # clean: 0 takes nothing, else kept in the part until confirm
        if amount == 0:
            return False
        self.table.rows[row][:len(data)] = data
        self.waiting.append(Part(self.next_number, row, amount, len(data)))
        self.next_number += 1
        return True

    def add_blocking(self, data):
        amount = self.credit.draw(len(data))  # clean: settled without a row, else kept in the part
        row = self.table.grab()  # clean: near miss, kept in the waiting part, confirm or cancel release it
        if row < 0:
            self.credit.settle(amount)
            return False
        self.table.rows[row][:len(data)] = data
        self.waiting.append(Part(self.next_number, row, amount, len(data)))
        self.next_number += 1
        return True

    def confirm(self):
        """Sends the oldest waiting part."""
        if not self.waiting:
            return False
        part = self.waiting.popleft()
        view = memoryview(self.table.rows[part.row])[:part.length]
        part.etag = self.store.put_part(self.key, part.number, view)
        self.table.release(part.row)
        self.credit.settle(part.credit)
        self.confirmed.append(part.number)
        return bool(part.etag)

    def finish(self):
        while self.waiting:
            self.confirm()
        self.store.complete(self.key, self.confirmed)
        return len(self.confirmed)

    def cancel(self):
        for part in self.waiting:
            self.table.release(part.row)
            self.credit.settle(part.credit)
        self.waiting.clear()


class RecentParts:
    """Keeps the rows of the last parts for a quick resend; drop() gives up all that are kept."""

    def __init__(self, table, depth=8):
        self.table = table
        self.ring = deque(maxlen=depth)

    def remember(self, data):
        row = self.table.grab()  # leak: a full ring pushes out its oldest row without releasing it
        if row < 0:
            return -1
        self.table.rows[row][:len(data)] = data
        self.ring.append((row, len(data)))
        return row

    def drop(self):
        while self.ring:
            row, _ = self.ring.pop()
            self.table.release(row)


class RetainedParts:
    def __init__(self, table, depth=8):
        self.table = table
        self.depth = depth
        self.ring = deque()

    def remember(self, data):
        row = self.table.grab()  # clean: near miss, the oldest is released when the ring is full
        if row < 0:
            return -1
        if len(self.ring) == self.depth:
            self.table.release(self.ring.popleft()[0])
        self.table.rows[row][:len(data)] = data
        self.ring.append((row, len(data)))
        return row

    def drop(self):
        while self.ring:
            self.table.release(self.ring.pop()[0])


def compose(store, table, keys, target):
    """Concatenates small objects through two rows that are used in turns."""
    pair = table.grab_pair()  # clean: None-checked, both rows released
    if pair is None:
        return 0
    front, back = pair
    number = 0
    for key in keys:
        data = store.objects.get(key, b"")
        table.rows[front][:len(data)] = data
        number += 1
        store.put_part(target, number, memoryview(table.rows[front])[:len(data)])
        front, back = back, front
    table.release(front)
    table.release(back)
    return number


def interleave(store, table, left, right, target):
    pair = table.grab_pair()  # leak: the first row is released, the second is not
    if pair is None:
        return False
    one, two = pair
    table.rows[one][:len(left)] = left
    table.rows[two][:len(right)] = right
    mixed = bytes(b for ab in zip(table.rows[one], table.rows[two]) for b in ab)
    store.put_part(target, 1, mixed)
    table.release(one)
    return True


def send_wide(store, table, key, blocks):
    run = table.grab_run(len(blocks))  # clean: every row of the run is released
    if not run:
        return 0
    for number, (row, block) in enumerate(zip(run, blocks), 1):
        table.rows[row][:len(block)] = block
        store.put_part(key, number, memoryview(table.rows[row])[:len(block)])
    for row in run:
        table.release(row)
    return len(run)


def send_narrow(store, table, key, blocks):
    with table.rows_for(len(blocks)) as rows:  # clean: context manager
        if len(rows) < len(blocks):
            return 0
        for number, (row, block) in enumerate(zip(rows, blocks), 1):
            table.rows[row][:len(block)] = block
            store.put_part(key, number, memoryview(table.rows[row])[:len(block)])
        return len(rows)
