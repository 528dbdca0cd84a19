import heapq


class Wal:
    SEG = 1 << 24

    def __init__(self):
        self.end = 0
        self.oldest_seg = 0
        self._holds = []

    def append(self, record):
        self.end += len(record)
        return self.end

    def hold_from(self, lsn):
        heapq.heappush(self._holds, lsn)
        return lsn

    def let_go(self, lsn):
        self._holds.remove(lsn)
        heapq.heapify(self._holds)

    def recycle(self):
        keep = self._holds[0] if self._holds else self.end
        while (self.oldest_seg + 1) * self.SEG <= keep:
            self.oldest_seg += 1


class Replica:
    def __init__(self, wal, sock):
        self.wal = wal
        self.sock = sock
        self.position = None

    def connect(self, start):
        self.position = self.wal.hold_from(start)  # clean: kept as position, let go by disconnect()

    def disconnect(self):
        if self.position is not None:
            self.wal.let_go(self.position)
            self.position = None


def base_backup(wal, copy, verify):
    start = wal.hold_from(wal.end)  # leak: a backup that does not verify keeps the log from recycling
    files = copy()
    if not verify(files):
        return None
    wal.let_go(start)
    return start, files


def archive(wal, upload, lsn):
    held = wal.hold_from(lsn)  # clean: let go in finally
    try:
        return upload(held, wal.end)
    finally:
        wal.let_go(held)


def lag_report(wal, replicas):
    lines = []
    for r in replicas:
        held = wal.hold_from(r.position or wal.end)  # leak: replicas up to date continue with the hold
        if held == wal.end:
            continue
        lines.append((r, wal.end - held))
        wal.let_go(held)
    return lines
