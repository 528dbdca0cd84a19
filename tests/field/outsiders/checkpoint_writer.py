# sharded checkpoint writer: stages tensors in pinned host buffers, writes shards with plain files
import json
import logging
import os
import threading
from typing import Dict, List, Optional, Tuple

import torch

logger = logging.getLogger(__name__)


class PinnedPool:
    def __init__(self, count, nbytes):
        self.sem = threading.Semaphore(count)
        self.lock = threading.Lock()
        self.nbytes = nbytes
        self.stack = []

    def take(self):
        with self.lock:
            if self.stack:
                return self.stack.pop()
        return torch.empty(self.nbytes, dtype=torch.uint8)

    def return_(self, buf):
        with self.lock:
            self.stack.append(buf)


class ShardWriter:
    def __init__(self, root, pool):
        self.root = root
        self.pool = pool
        self.manifest: Dict[str, List[int]] = {}
        self.index = None
        self.data = None

    def begin(self, step):
        path = os.path.join(self.root, "step-%08d" % step)
        os.makedirs(path, exist_ok=True)
        self.data = open(os.path.join(path, "data.bin"), "wb")  # clean: finish() closes it
        self.index = open(os.path.join(path, "index.json"), "w")  # leak: finish() returns early when nothing was written

    def finish(self):
        self.data.close()
        if not self.manifest:
            return
        json.dump(self.manifest, self.index)
        self.index.close()
        self.manifest = {}

    def write(self, name, t):
        buf = self.pool.take()  # clean: returned after the write
        raw = t.detach().cpu().contiguous().view(torch.uint8).flatten()
        buf[: raw.numel()].copy_(raw)
        self.manifest[name] = [self.data.tell(), raw.numel()]
        self.data.write(buf[: raw.numel()].numpy().tobytes())
        self.pool.return_(buf)

    def write_chunked(self, name, t):
        raw = t.detach().cpu().contiguous().view(torch.uint8).flatten()
        start = self.data.tell()
        buf = self.pool.take()  # clean: near miss, one buffer serves all chunks and goes back after the loop
        for off in range(0, raw.numel(), self.pool.nbytes):
            part = raw[off:off + self.pool.nbytes]
            buf[: part.numel()].copy_(part)
            self.data.write(buf[: part.numel()].numpy().tobytes())
        self.pool.return_(buf)
        self.manifest[name] = [start, raw.numel()]

    def write_double_buffered(self, name, t):
        raw = t.detach().cpu().contiguous().view(torch.uint8).flatten()
        front = self.pool.take()  # leak: the loop swaps in new buffers and only the last pair goes back
        back = self.pool.take()  # leak: after the second round it is displaced too
        start = self.data.tell()
        for off in range(0, raw.numel(), self.pool.nbytes):
            part = raw[off:off + self.pool.nbytes]
            front[: part.numel()].copy_(part)
            self.data.write(front[: part.numel()].numpy().tobytes())
            front = back
            back = self.pool.take()  # leak: each round's new buffer displaces one that nobody returns
        self.pool.return_(front)
        self.pool.return_(back)
        self.manifest[name] = [start, raw.numel()]

    def write_swapped(self, name, t):
        raw = t.detach().cpu().contiguous().view(torch.uint8).flatten()
        a = self.pool.take()  # clean: near miss, swapping two names loses neither
        b = self.pool.take()  # clean: near miss, swapping two names loses neither
        start = self.data.tell()
        for off in range(0, raw.numel(), self.pool.nbytes):
            part = raw[off:off + self.pool.nbytes]
            a[: part.numel()].copy_(part)
            self.data.write(a[: part.numel()].numpy().tobytes())
            a, b = b, a
        self.pool.return_(a)
        self.pool.return_(b)
        self.manifest[name] = [start, raw.numel()]


def read_manifest(root, step) -> Optional[dict]:
    path = os.path.join(root, "step-%08d" % step, "index.json")
    if not os.path.exists(path):
        return None
    f = open(path)  # leak: an empty file returns before the close
    text = f.read()
    if not text:
        return None
    f.close()
    return json.loads(text)


def read_tensor(root, step, entry: Tuple[int, int], pool) -> torch.Tensor:
    buf = pool.take()  # clean: a clone leaves, the buffer goes back
    with open(os.path.join(root, "step-%08d" % step, "data.bin"), "rb") as f:  # clean: with block
        f.seek(entry[0])
        raw = f.read(entry[1])
    buf[: len(raw)].copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    out = buf[: len(raw)].clone()
    pool.return_(buf)
    return out


def verify(root, step, pool) -> bool:
    manifest = read_manifest(root, step)
    if manifest is None:
        return False
    for name, entry in manifest.items():
        buf = pool.take()  # leak: the first bad entry returns with the buffer
        if entry[1] > buf.numel():
            logger.error("%s is larger than a staging buffer", name)
            return False
        pool.return_(buf)
    return True
