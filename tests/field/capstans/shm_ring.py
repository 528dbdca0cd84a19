"""Shared memory frames between the engine and the detokenizer processes.

The engine writes token ids into a frame and sends its index; the detokenizer sends the index
back when it has read the frame.
"""
import multiprocessing as mp
import os
import struct
from multiprocessing import shared_memory

HEADER = struct.Struct("<IIQ")


class FrameBoard:
    """A byte map of frames in one segment: 0 is free, 1 is taken."""

    def __init__(self, name, frames, frame_size):
        self.frames = frames
        self.frame_size = frame_size
        self.shm = shared_memory.SharedMemory(name=name, create=True, size=frames * frame_size)
        self.map = bytearray(frames)

    def take(self):
        i = self.map.find(b"\0")
        if i < 0:
            return None
        self.map[i] = 1
        return i

    def take_for(self, nbytes):
        """As many frames as nbytes need, or [] if there are too few."""
        need = -(-nbytes // self.frame_size)
        got = []
        while len(got) < need:
            i = self.take()  # clean: frames of a short run are wiped before the empty answer
            if i is None:
                self.wipe_all(got)
                return []
            got.append(i)
        return got

    def take_adjacent(self):
        first = self.take()  # leak: two frames apart are refused with the first still marked
        second = self.take()  # leak: two frames apart are refused with the second still marked
        if first is None or second is None:
            if first is not None:
                self.wipe(first)
            return None
        if second != first + 1:
            return None
        return first

    def wipe(self, i):
        self.map[i] = 0

    def wipe_all(self, ids):
        for i in ids:
            self.wipe(i)

    def write(self, i, payload):
        off = i * self.frame_size
        self.shm.buf[off:off + len(payload)] = payload

    def close(self):
        self.shm.close()
        self.shm.unlink()


class TokenBatch:
    def __init__(self, rid, ids, last):
        self.rid = rid
        self.ids = ids
        self.last = last

    def pack(self):
        return HEADER.pack(self.rid, len(self.ids), int(self.last)) + struct.pack(f"<{len(self.ids)}I", *self.ids)


class DetokLink:
    def __init__(self, board, conn):
        self.board = board
        self.conn = conn
        self.posted = set()
        self.spare = None
        self.pid = os.getpid()

    def post(self, batch):
        payload = batch.pack()
        if len(payload) > self.board.frame_size:
            return self.post_long(payload)
        i = self.board.take()  # clean: near miss, added to self.posted, which collect() and reset() wipe
        if i is None:
            return False
        self.board.write(i, payload)
        self.posted.add(i)
        self.conn.send((i,))
        return True

    def post_long(self, payload):
        ids = self.board.take_for(len(payload))  # clean: added to self.posted unless there were too few
        if not ids:
            return False
        size = self.board.frame_size
        for k, i in enumerate(ids):
            self.board.write(i, payload[k * size:(k + 1) * size])
        self.posted.update(ids)
        self.conn.send(tuple(ids))
        return True

    def post_text(self, text):
        i = self.board.take()  # leak: text that does not fit returns False with the frame taken
        if i is None:
            return False
        raw = text.encode()
        if len(raw) > self.board.frame_size:
            return False
        self.board.write(i, raw)
        self.posted.add(i)
        self.conn.send((i,))
        return True

    def post_all(self, batches):
        sent = 0
        i = None
        for b in batches:
            if i is None:
                i = self.board.take()  # clean: near miss, an unused frame stays in i and is wiped after the loop
            if i is None:
                break
            payload = b.pack()
            if len(payload) > self.board.frame_size:
                continue
            self.board.write(i, payload)
            self.posted.add(i)
            self.conn.send((i,))
            i = None
            sent += 1
        if i is not None:
            self.board.wipe(i)
        return sent

    def collect(self, timeout=0.0):
        n = 0
        while self.conn.poll(timeout):
            for i in self.conn.recv():
                if i in self.posted:
                    self.posted.discard(i)
                    self.board.wipe(i)
                    n += 1
        return n

    def reset(self):
        self.board.wipe_all(self.posted)
        self.posted.clear()
        if self.spare is not None:
            self.board.wipe(self.spare)
            self.spare = None

    def hold_spare(self):
        """One frame is kept aside for the abort message."""
        if self.spare is None:
            self.spare = self.board.take()  # clean: kept in self.spare, used by abort() or wiped by reset()
        return self.spare is not None

    def abort(self, rid):
        i, self.spare = self.spare, None
        if i is None:
            i = self.board.take()  # clean: near miss, runs only without a spare and is posted below
        if i is None:
            return False
        self.board.write(i, HEADER.pack(rid, 0, 2))
        self.posted.add(i)
        self.conn.send((i,))
        return True

    def ping(self, tries=5):
        for _ in range(tries):
            i = self.board.take()  # leak: each try without an answer takes another frame
            if i is None:
                return False
            self.board.write(i, b"ping")
            self.conn.send((i,))
            if self.conn.poll(0.2):
                self.conn.recv()
                self.board.wipe(i)
                return True
        return False

    def echo(self, payload):
        i = self.board.take()  # clean: wiped in finally
        if i is None:
            return None
        try:
            self.board.write(i, payload)
            self.conn.send((i,))
            if not self.conn.poll(1.0):
                return None
            return self.conn.recv()
        finally:
            self.board.wipe(i)


def open_link(frames=256, frame_size=4096):
    ours, theirs = mp.Pipe()
    board = FrameBoard(f"detok-{os.getpid()}", frames, frame_size)
    return DetokLink(board, ours), theirs
