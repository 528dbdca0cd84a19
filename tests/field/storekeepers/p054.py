from collections import OrderedDict, namedtuple

Claim = namedtuple("Claim", "partition offset cursor attempts")


class Cursor:
    def __init__(self, ident):
        self.ident = ident
        self.position = 0

    def seek(self, offset):
        self.position = offset


class CursorPool:
    def __init__(self, count):
        self.parked = [Cursor(i) for i in range(count)]

    def unpark(self):
        return self.parked.pop()

    def park(self, cursor):
        cursor.position = 0
        self.parked.append(cursor)


class PartitionReader:
    def __init__(self, pool, fetch, max_attempts):
        self.pool = pool
        self.fetch = fetch
        self.max_attempts = max_attempts
        self.claims = OrderedDict()
        self.tail = {}

    def claim(self, partition, offset):
        if partition in self.claims:
            return False
        cursor = self.pool.unpark()  # leak: retry replaces the claim along with its cursor
        cursor.seek(offset)
        self.claims[partition] = Claim(partition, offset, cursor, 0)
        return True

    def poll(self):
        rows = []
        for partition in list(self.claims):
            claim = self.claims[partition]
            batch = self.fetch(partition, claim.cursor.position)
            if batch is None:
                self.retry(partition)
                continue
            claim.cursor.seek(claim.cursor.position + len(batch))
            rows.extend(batch)
        return rows

    def retry(self, partition):
        claim = self.claims.pop(partition)
        if claim.attempts >= self.max_attempts:
            self.pool.park(claim.cursor)
            return
        cursor = self.pool.unpark()  # leak: another failed poll replaces the claim once more
        cursor.seek(claim.offset)
        self.claims[partition] = Claim(partition, claim.offset, cursor, claim.attempts + 1)

    def revoke(self, partition):
        claim = self.claims.pop(partition, None)
        if claim is not None:
            self.pool.park(claim.cursor)

    def follow(self, partition):
        if partition not in self.tail:
            self.tail[partition] = self.pool.unpark()  # clean: unfollow parks it
        cursor = self.tail[partition]
        batch = self.fetch(partition, cursor.position) or []
        cursor.seek(cursor.position + len(batch))
        return batch

    def unfollow(self):
        while self.tail:
            self.pool.park(self.tail.popitem()[1])

    def count(self, partition):
        cursor = self.pool.unpark()  # clean: parked below
        total = 0
        while batch := self.fetch(partition, cursor.position):
            total += len(batch)
            cursor.seek(total)
        self.pool.park(cursor)
        return total
