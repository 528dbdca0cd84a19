"""Sharded checkpoint writer with pinned chunks, locks and file handles."""
import json
import os
import tempfile
import threading

import torch


class ChunkRack:
    """Chunks are numbered; a counter and a list say which are free."""

    def __init__(self, n, nbytes):
        self.chunks = [bytearray(nbytes) for _ in range(n)]
        self.free_ids = list(range(n))
        self.cond = threading.Condition()
        self.nbytes = nbytes

    def withdraw(self):
        with self.cond:
            while not self.free_ids:
                self.cond.wait()
            return self.free_ids.pop()  # clean: handed to the caller

    def deposit(self, cid):
        with self.cond:
            self.free_ids.append(cid)
            self.cond.notify()

    def withdraw_some(self, want):
        with self.cond:
            n = min(want, len(self.free_ids))
            return [self.free_ids.pop() for _ in range(n)]  # clean: the list goes to the caller


class ShardFile:
    def __init__(self, path):
        self.path = path
        self.fh = open(path, "wb")  # clean: closed by close

    def write(self, data):
        self.fh.write(data)

    def close(self):
        self.fh.close()


class Writer:
    def __init__(self, root, rack):
        self.root = root
        self.rack = rack
        self.busy = threading.Lock()
        self.files = {}

    def _path(self, rank):
        return os.path.join(self.root, f"shard{rank:04d}.bin")

    def open_shard(self, rank):
        if rank not in self.files:
            self.files[rank] = ShardFile(self._path(rank))  # clean: near miss, finish closes every shard in the table
        return self.files[rank]

    def reopen_shard(self, rank):
        self.files[rank] = ShardFile(self._path(rank))  # leak: a shard already in the table is overwritten without close
        return self.files[rank]

    def write_tensor(self, rank, tensor):
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        shard = self.open_shard(rank)
        for at in range(0, len(raw), self.rack.nbytes):
            part = raw[at : at + self.rack.nbytes]
            cid = self.rack.withdraw()  # clean: deposited in every turn
            self.rack.chunks[cid][: len(part)] = part
            shard.write(self.rack.chunks[cid][: len(part)])
            self.rack.deposit(cid)

    def write_sparse(self, rank, tensor):
        shard = self.open_shard(rank)
        for row in tensor:
            cid = self.rack.withdraw()  # leak: zero rows continue before the deposit
            raw = row.contiguous().view(torch.uint8).numpy().tobytes()
            if not any(raw):
                shard.write(b"\0")
                continue
            self.rack.chunks[cid][: len(raw)] = raw
            shard.write(self.rack.chunks[cid][: len(raw)])
            self.rack.deposit(cid)

    def write_many(self, rank, parts):
        ids = self.rack.withdraw_some(len(parts))  # leak: the deposit loop skips the first id
        shard = self.open_shard(rank)
        for cid, part in zip(ids, parts):
            self.rack.chunks[cid][: len(part)] = part
            shard.write(self.rack.chunks[cid][: len(part)])
        for cid in ids[1:]:
            self.rack.deposit(cid)
        return len(ids)

    def manifest(self):
        fd, tmp = tempfile.mkstemp(dir=self.root)  # clean: near miss, fdopen takes the descriptor over and closes it
        with os.fdopen(fd, "w") as fh:  # clean: the with closes it
            json.dump(sorted(self.files), fh)
        os.replace(tmp, os.path.join(self.root, "manifest.json"))

    def touch_marker(self, name):
        path = os.path.join(self.root, name)
        fd = os.open(path, os.O_CREAT | os.O_WRONLY)  # leak: a marker already filled returns without os.close
        if os.fstat(fd).st_size:
            return False
        os.write(fd, b"done")
        os.close(fd)
        return True

    def try_save(self, rank, tensor):
        if not self.busy.acquire(blocking=False):  # clean: near miss, released in the finally, also for the early return
            return False
        try:
            if tensor.numel() == 0:
                return True
            self.write_tensor(rank, tensor)
            return True
        finally:
            self.busy.release()

    def begin(self):
        self.busy.acquire()  # clean: near miss, the paired commit and abort both release

    def commit(self):
        self.manifest()
        self.busy.release()

    def abort(self):
        self.files_close()
        self.busy.release()

    def save_all(self, state):
        self.begin()  # clean: near miss, each branch ends in commit or abort
        for rank, tensor in state.items():
            if not torch.isfinite(tensor).all():
                self.abort()
                return False
            self.write_tensor(rank, tensor)
        self.commit()
        return True

    def save_delta(self, state, base):
        self.begin()  # leak: nothing changed returns without commit or abort
        changed = {r: t for r, t in state.items() if r not in base or not torch.equal(t, base[r])}
        if not changed:
            return 0
        for rank, tensor in changed.items():
            self.write_tensor(rank, tensor)
        self.commit()
        return len(changed)

    def files_close(self):
        for shard in self.files.values():
            shard.close()
        self.files.clear()

    def finish(self):
        self.files_close()
