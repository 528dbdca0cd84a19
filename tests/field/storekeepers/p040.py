class SegmentFile:
    def __init__(self, number):
        self.number = number
        self.offset = 0
        self.records = []


class SegmentPool:
    """Preallocated log segments."""

    def __init__(self, count):
        self.blank = [SegmentFile(i) for i in range(count)]

    def allot(self):
        return self.blank.pop(0)

    def wipe(self, segment):
        segment.offset = 0
        segment.records.clear()
        self.blank.append(segment)


class WriteAheadLog:
    def __init__(self, pool, limit):
        self.pool = pool
        self.limit = limit
        self.current = pool.allot()  # leak: when full it is retired to a list that trim never wipes
        self.retired = []
        self.markers = {}
        self.lsn = 0

    def append(self, record):
        if self.current.offset + len(record) > self.limit:
            self.retired.append(self.current)
            self.current = self.pool.allot()  # leak: retired in turn and dropped by trim
        self.current.records.append(record)
        self.current.offset += len(record)
        self.lsn += 1
        return self.lsn

    def trim(self, number):
        self.retired = [s for s in self.retired if s.number >= number]
        return len(self.retired)

    def mark(self, name):
        if name in self.markers:
            return
        segment = self.pool.allot()  # clean: unmark and close wipe it
        segment.records.append(self.lsn)
        self.markers[name] = segment

    def unmark(self, name):
        segment = self.markers.pop(name, None)
        if segment is None:
            return None
        lsn = segment.records[0]
        self.pool.wipe(segment)
        return lsn

    def copy_tail(self, count):
        staging = self.pool.allot()  # clean: wiped below
        staging.records.extend(self.current.records[-count:])
        tail = list(staging.records)
        self.pool.wipe(staging)
        return tail

    def close(self):
        for name in list(self.markers):
            self.unmark(name)
        for segment in self.retired:
            self.pool.wipe(segment)
        self.retired = []
        self.pool.wipe(self.current)
