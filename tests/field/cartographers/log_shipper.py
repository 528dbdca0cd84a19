"""Ships structured training logs from ranks to the collector.

Lines are packed into reusable frames; full frames go over a small set of
sockets, or to a spool file on disk while the collector is away.
"""
import collections
import json
import logging
import os
import socket
import threading

log = logging.getLogger("shipper")


class Frame:
    __slots__ = ("data", "used", "seq")

    def __init__(self, cap):
        self.data = bytearray(cap)
        self.used = 0
        self.seq = -1

    def room(self, n):
        return self.used + n <= len(self.data)

    def append(self, raw):
        self.data[self.used:self.used + len(raw)] = raw
        self.used += len(raw)


class FrameBin:
    def __init__(self, count, cap=1 << 16):
        self._bin = collections.deque(Frame(cap) for _ in range(count))
        self._lock = threading.Lock()
        self.dry = 0

    def fish(self):
        with self._lock:
            if not self._bin:
                self.dry += 1
                return None
            f = self._bin.popleft()
        f.used = 0
        return f

    def toss(self, frame):
        with self._lock:
            self._bin.append(frame)

    def fish_clean(self, max_seq):
        """A frame not in use by a replay later than max_seq."""
        with self._lock:
            while self._bin:
                f = self._bin.popleft()  # leak: frames above max_seq fall out of the bin
                if f.seq <= max_seq:
                    f.used = 0
                    return f
            return None

    def fish_rotating(self, max_seq):
        with self._lock:
            for _ in range(len(self._bin)):
                f = self._bin.popleft()  # clean: near miss, unfit frames go to the other end
                if f.seq <= max_seq:
                    f.used = 0
                    return f
                self._bin.append(f)
            return None


class SocketRack:
    def __init__(self, addr, n):
        self.addr = addr
        self._rack = [None] * n
        self._taken = [False] * n
        self._lock = threading.Lock()

    def plug(self):
        with self._lock:
            for i, taken in enumerate(self._taken):
                if not taken:
                    self._taken[i] = True
                    break
            else:
                return None
        if self._rack[i] is None:
            try:
                self._rack[i] = socket.create_connection(self.addr)  # clean: kept in the rack, unplug closes it when broken
            except OSError:
                self._taken[i] = False
                return None
        return i

    def sock(self, i):
        return self._rack[i]

    def unplug(self, i, broken=False):
        with self._lock:
            if broken and self._rack[i] is not None:
                self._rack[i].close()
                self._rack[i] = None
            self._taken[i] = False


class Shipper:
    def __init__(self, frames, rack, spool_dir):
        self.frames = frames
        self.rack = rack
        self.spool_dir = spool_dir
        self.current = None
        self.unacked = {}
        self.backlog = collections.deque()
        self.seq = 0

    # ---- packing

    def write(self, record):
        raw = json.dumps(record).encode() + b"\n"
        if self.current is not None and not self.current.room(len(raw)):
            self.rotate()
        if self.current is None:
            self.current = self.frames.fish()  # clean: near miss, rotate() moves it on and clears the field
            if self.current is None:
                return False
        self.current.append(raw)
        return True

    def rotate(self):
        frame, self.current = self.current, None
        if frame is not None:
            self._queue(frame)

    def _queue(self, frame, front=False):
        self.seq += 1
        frame.seq = self.seq
        if front:
            self.backlog.appendleft(frame)
        else:
            self.backlog.append(frame)

    def write_urgent(self, record):
        raw = json.dumps(record).encode()
        frame = self.frames.fish()  # leak: a record that does not fit returns with the frame
        if frame is None:
            return False
        if not frame.room(len(raw)):
            log.error("record of %d bytes does not fit", len(raw))
            return False
        frame.append(raw)
        self._queue(frame, front=True)
        return True

    def sample(self, records, every):
        """Packs each every-th record of a burst into one frame."""
        frame = self.frames.fish()  # leak: fished before the empty pick returns
        picked = records[::every]
        if not picked or frame is None:
            return 0
        for r in picked:
            raw = json.dumps(r).encode()
            if frame.room(len(raw)):
                frame.append(raw)
        self._queue(frame)
        return len(picked)

    def write_block(self, records):
        frame = self.frames.fish()  # clean: near miss, put into the backlog before each rebinding
        if frame is None:
            return 0
        n = 0
        for r in records:
            raw = json.dumps(r).encode()
            if not frame.room(len(raw)):
                self._queue(frame)
                frame = self.frames.fish()  # clean: backlog or tossed or None
                if frame is None:
                    return n
            frame.append(raw)
            n += 1
        if frame.used:
            self._queue(frame)
        else:
            self.frames.toss(frame)
        return n

    # ---- sending

    def pump(self):
        while self.backlog:
            i = self.rack.plug()  # clean: unplugged on each way
            if i is None:
                return
            frame = self.backlog.popleft()
            try:
                self.rack.sock(i).sendall(memoryview(frame.data)[:frame.used])
            except OSError:
                self.backlog.appendleft(frame)
                self.rack.unplug(i, broken=True)
                return
            self.unacked[frame.seq] = frame
            self.rack.unplug(i)

    def on_ack(self, seq):
        for s in [s for s in self.unacked if s <= seq]:
            self.frames.toss(self.unacked.pop(s))

    def ping(self):
        i = self.rack.plug()  # leak: a failed ping returns with the socket taken
        if i is None:
            return False
        try:
            self.rack.sock(i).sendall(b"PING\n")
        except OSError as exc:
            log.info("collector away: %s", exc)
            return False
        self.rack.unplug(i)
        return True

    # ---- spooling

    def spool(self):
        path = os.path.join(self.spool_dir, "%08d.spool" % self.seq)
        fh = open(path, "ab")  # clean: closed in finally
        try:
            while self.backlog:
                frame = self.backlog.popleft()
                fh.write(memoryview(frame.data)[:frame.used])
                self.frames.toss(frame)
        finally:
            fh.close()

    def unspool(self, path):
        fh = open(path, "rb")  # leak: stays open when the frames run dry
        while True:
            frame = self.frames.fish()  # clean: backlog takes it, tossed at end of file
            if frame is None:
                log.warning("no frames, %s replayed partly", path)
                return False
            n = fh.readinto(frame.data)
            if n == 0:
                self.frames.toss(frame)
                break
            frame.used = n
            self._queue(frame)
        fh.close()
        os.unlink(path)
        return True

    def close(self):
        self.rotate()
        while self.backlog:
            self.frames.toss(self.backlog.popleft())
        for seq in list(self.unacked):
            self.frames.toss(self.unacked.pop(seq))
