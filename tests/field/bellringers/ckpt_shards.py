"""Sharded checkpoint save and load with bounded writers and staging blocks."""
import hashlib
import io
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, Queue

import torch


class StagingBlocks:
    """A fixed set of host blocks kept in a queue."""

    def __init__(self, count, nbytes):
        self.nbytes = nbytes
        self._q = Queue()
        for _ in range(count):
            self._q.put(bytearray(nbytes))

    def get_block(self, timeout=None):
        try:
            return self._q.get(timeout=timeout)
        except Empty:
            return None

    def put_block(self, block):
        self._q.put(block)


class ShardStore:
    """Keeps shard files open between appends; checkout is exclusive per shard."""

    def __init__(self, root):
        self.root = root
        self._idle = {}
        self._mu = threading.Lock()

    def checkout(self, name):
        with self._mu:
            f = self._idle.pop(name, None)
        if f is None:
            f = open(os.path.join(self.root, name), "ab")  # clean: returned to the caller
        return f

    def restore(self, name, f):
        with self._mu:
            other = self._idle.pop(name, None)
            self._idle[name] = f
        if other is not None:
            other.close()

    def close(self):
        with self._mu:
            for f in self._idle.values():
                f.close()
            self._idle.clear()


class CheckpointWriter:
    def __init__(self, root, blocks, max_writers=4):
        self.root = root
        self.blocks = blocks
        self.store = ShardStore(root)
        self.permits = threading.BoundedSemaphore(max_writers)
        self.pool = ThreadPoolExecutor(max_writers)
        self.failed = []
        self.seen = set()

    def save_async(self, rank, state):
        self.permits.acquire()  # clean: near miss, the worker it is handed to releases it in finally
        return self.pool.submit(self._save_job, rank, state)

    def _save_job(self, rank, state):
        try:
            return self.write_shard(rank, state)
        finally:
            self.permits.release()

    def write_shard(self, rank, state):
        block = self.blocks.get_block()  # leak: not given back when the payload does not fit
        payload = io.BytesIO()
        torch.save(state, payload)
        data = payload.getbuffer()
        if len(data) > len(block):
            self.failed.append(rank)
            return None
        block[:len(data)] = data
        path = os.path.join(self.root, f"shard-{rank:05d}.pt")
        with open(path + ".tmp", "wb") as f:  # clean: closed by with
            f.write(memoryview(block)[:len(data)])
        self.blocks.put_block(block)
        os.replace(path + ".tmp", path)
        return path

    def append_log(self, name, records):
        f = self.store.checkout(name)  # clean: given back after the flush
        for r in records:
            f.write(json.dumps(r).encode() + b"\n")
        f.flush()
        self.store.restore(name, f)

    def append_once(self, name, key, record):
        f = self.store.checkout(name)  # leak: not given back when the key was written before
        if (name, key) in self.seen:
            return False
        f.write(json.dumps(record).encode() + b"\n")
        self.seen.add((name, key))
        self.store.restore(name, f)
        return True

    def save_all(self, shards, deadline):
        written = 0
        for rank, state in shards.items():
            if not self.permits.acquire(timeout=1.0):  # leak: not released for a rank whose file is already there
                self.failed.append(rank)
                continue
            if os.path.exists(os.path.join(self.root, f"shard-{rank:05d}.pt")):
                continue
            self.write_shard(rank, state)
            self.permits.release()
            written += 1
            if time.monotonic() > deadline:
                break
        return written

    def barrier(self, n):
        """Take all permits so that no writer is running, then let them go."""
        for _ in range(n):
            self.permits.acquire()  # clean: near miss, the same count is released below
        for _ in range(n):
            self.permits.release()

    def close(self):
        self.pool.shutdown(wait=True)
        self.store.close()


class CheckpointReader:
    def __init__(self, root, blocks):
        self.root = root
        self.blocks = blocks

    def _read_into_block(self, rank):
        path = os.path.join(self.root, f"shard-{rank:05d}.pt")
        block = self.blocks.get_block(timeout=5.0)  # clean: handed to the caller or given back when the file is missing
        if block is None:
            raise TimeoutError("no staging block")
        try:
            with open(path, "rb") as f:  # clean: closed by with
                n = f.readinto(block)
        except FileNotFoundError:
            self.blocks.put_block(block)
            return None, 0
        return block, n

    def load(self, rank):
        block, n = self._read_into_block(rank)  # clean: given back after decoding
        if block is None:
            return None
        state = torch.load(io.BytesIO(bytes(block[:n])), map_location="cpu")
        self.blocks.put_block(block)
        return state

    def digest(self, rank):
        block, n = self._read_into_block(rank)  # leak: the block is hashed and dropped
        if block is None:
            return None
        return hashlib.sha256(memoryview(block)[:n]).hexdigest()

    def load_with_retry(self, rank, tries=3):
        for attempt in range(tries):
            block, n = self._read_into_block(rank)  # clean: near miss, given back before every retry
            if block is None:
                time.sleep(2 ** attempt)
                continue
            try:
                state = torch.load(io.BytesIO(bytes(block[:n])))
            except (EOFError, RuntimeError):
                self.blocks.put_block(block)
                continue
            self.blocks.put_block(block)
            return state
        return None

    def peek_header(self, rank):
        f = open(os.path.join(self.root, f"shard-{rank:05d}.pt"), "rb")  # leak: not closed when the magic does not match
        magic = f.read(8)
        if magic[:2] != b"PK":
            return None
        header = f.read(256)
        f.close()
        return header

    def merge(self, ranks):
        merged = {}
        for rank in ranks:
            state = self.load(rank)
            if state is None:
                continue
            merged.update(state)
        return merged
