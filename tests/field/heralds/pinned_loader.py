import logging
import queue
import threading
import time
from pathlib import Path

import numpy as np
import torch

LOG = logging.getLogger("loader")

MAGIC = b"TOK1"


class CorruptShard(ValueError):
    pass


class PinnedPool:
    """A fixed number of page-locked host buffers shared by all threads."""

    def __init__(self, count, nbytes):
        self.nbytes = nbytes
        self.count = count
        self._buffers = queue.Queue()
        for _ in range(count):
            self._buffers.put(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))

    def borrow(self, timeout=None):
        return self._buffers.get(timeout=timeout)  # clean: handed to the caller

    def borrow_nowait(self):
        try:
            return self._buffers.get_nowait()  # clean: handed to the caller
        except queue.Empty:
            return None

    def restore(self, buf):
        self._buffers.put(buf)

    def resize(self, nbytes):
        """Exchange the idle buffers for larger ones."""
        for _ in range(self._buffers.qsize()):
            try:
                old = self._buffers.get_nowait()  # leak: a buffer that is large enough already is skipped and not put back
            except queue.Empty:
                break
            if old.numel() >= nbytes:
                continue
            del old
            self._buffers.put(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))
        self.nbytes = nbytes


class Batch:
    def __init__(self, pool, tokens_buf, n, mask_buf=None):
        self.pool = pool
        self.tokens_buf = tokens_buf
        self.mask_buf = mask_buf
        self.n = n

    def to_device(self, device, stream):
        with torch.cuda.stream(stream):
            tokens = self.tokens_buf[: self.n * 4].view(torch.int32).to(device, non_blocking=True)
            mask = None
            if self.mask_buf is not None:
                mask = self.mask_buf[: self.n].to(device, non_blocking=True)
        stream.synchronize()
        return tokens, mask

    def close(self):
        if self.tokens_buf is not None:
            self.pool.restore(self.tokens_buf)
            self.tokens_buf = None


def parse_header(raw):
    if raw[:4] != MAGIC:
        raise CorruptShard("bad magic")
    return int.from_bytes(raw[4:8], "little")


class ShardReader(threading.Thread):
    """Reads whole shards into pinned memory."""

    def __init__(self, pool, paths, out, stop):
        super().__init__(daemon=True, name="shard-reader")
        self.pool = pool
        self.paths = paths
        self.out = out
        self.stop_event = stop
        self.bad = 0

    def run(self):
        for path in self.paths:
            if self.stop_event.is_set():
                break
            buf = self.pool.borrow()  # leak: a corrupt shard is counted and skipped with the buffer in hand
            raw = path.read_bytes()
            try:
                n = parse_header(raw)
            except CorruptShard as exc:
                LOG.warning("%s: %s", path, exc)
                self.bad += 1
                continue
            data = np.frombuffer(raw, np.uint8, n * 4, offset=8)
            buf[: data.size].copy_(torch.from_numpy(data.copy()))
            self.out.put(Batch(self.pool, buf, n))
        self.out.put(None)


class MaskedReader(threading.Thread):
    """Reads shards that carry a loss mask behind the tokens."""

    def __init__(self, pool, paths, out, stop):
        super().__init__(daemon=True, name="masked-reader")
        self.pool = pool
        self.paths = paths
        self.out = out
        self.stop_event = stop

    def run(self):
        for path in self.paths:
            raw = path.read_bytes()
            try:
                n = parse_header(raw)
            except CorruptShard:
                LOG.exception("skipping %s", path)
                continue
            tokens = self.pool.borrow()  # leak: _offer gives up on a full queue after stop and drops the batch
            mask = self.pool.borrow()  # leak: Batch.close puts back the token buffer and forgets the mask
            body = np.frombuffer(raw, np.uint8, offset=8).copy()
            tokens[: n * 4].copy_(torch.from_numpy(body[: n * 4]))
            mask[:n].copy_(torch.from_numpy(body[n * 4: n * 5]))
            if not self._offer(Batch(self.pool, tokens, n, mask)):
                LOG.info("stopped with the queue full")
                break
        else:
            self.out.put(None)

    def _offer(self, batch):
        while True:
            try:
                self.out.put(batch, timeout=0.25)
                return True
            except queue.Full:
                if self.stop_event.is_set():
                    return False


class SyntheticReader(threading.Thread):
    """Random tokens, for benchmarks."""

    def __init__(self, pool, n, out, stop):
        super().__init__(daemon=True, name="synthetic")
        self.pool = pool
        self.n = n
        self.out = out
        self.stop_event = stop

    def run(self):
        while not self.stop_event.is_set():
            buf = self.pool.borrow_nowait()  # clean: near miss, None, closed after a full queue, or travels in the batch to the consumer
            if buf is None:
                time.sleep(0.01)
                continue
            buf[: self.n * 4].view(torch.int32).random_(0, 32000)
            batch = Batch(self.pool, buf, self.n)
            try:
                self.out.put(batch, timeout=1.0)
            except queue.Full:
                batch.close()
        self.out.put(None)


class Loader:
    def __init__(self, root, nbytes, depth=4, masked=False, synthetic=0):
        self.pool = PinnedPool(3 * depth, nbytes)
        self.ready = queue.Queue(maxsize=depth)
        self.stop = threading.Event()
        paths = sorted(Path(root).glob("*.tok"))
        if synthetic:
            self.reader = SyntheticReader(self.pool, synthetic, self.ready, self.stop)
        else:
            kind = MaskedReader if masked else ShardReader
            self.reader = kind(self.pool, paths, self.ready, self.stop)

    def __iter__(self):
        self.reader.start()
        stream = torch.cuda.Stream()
        while True:
            batch = self.ready.get()
            if batch is None:
                return
            try:
                tensors = batch.to_device("cuda", stream)
            finally:
                batch.close()
            yield tensors

    def close(self):
        self.stop.set()
        while self.reader.is_alive():
            try:
                batch = self.ready.get(timeout=0.1)
            except queue.Empty:
                continue
            if batch is not None:
                batch.close()
        while not self.ready.empty():
            batch = self.ready.get()
            if batch is not None:
                batch.close()


class CheckpointStager:
    """Copies parameters to pinned memory and writes them from a thread."""

    def __init__(self, pool):
        self.pool = pool
        self.latest = None
        self.lock = threading.Lock()

    def snapshot(self, name, tensor):
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if flat.numel() > self.pool.nbytes:
            raise ValueError(f"{name} does not fit")
        buf = self.pool.borrow()  # clean: near miss, ownership moves to the writer thread, which restores it in its finally
        buf[: flat.numel()].copy_(flat)
        threading.Thread(target=self._write, args=(name, buf, flat.numel())).start()

    def _write(self, name, buf, n):
        try:
            Path(f"{name}.bin").write_bytes(buf[:n].numpy().tobytes())
        except OSError as exc:
            LOG.error("checkpoint of %s: %s", name, exc)
        finally:
            self.pool.restore(buf)

    def keep_latest(self, tensor):
        """The last logits, for a debugger that attaches later."""
        buf = self.pool.borrow()  # leak: the swap hands the new buffer in and the returned old one is thrown away
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        buf[: flat.numel()].copy_(flat)
        self._swap_latest(buf)

    def _swap_latest(self, buf):
        with self.lock:
            old, self.latest = self.latest, buf
        return old

    def checksum(self, tensor):
        buf = self.pool.borrow()  # clean: the finally
        try:
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)[: buf.numel()]
            buf[: flat.numel()].copy_(flat)
            return int(buf[: flat.numel()].sum())
        finally:
            self.pool.restore(buf)
