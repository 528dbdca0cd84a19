import threading

import torch
import torch.distributed as dist


class CommBuffer:
    def __init__(self, tensor):
        self.tensor = tensor
        self.work = None


class CommBufferPool:
    def __init__(self, count, numel):
        self._lock = threading.Lock()
        self._buffers = [CommBuffer(torch.zeros(numel)) for _ in range(count)]

    def get(self):
        with self._lock:
            return self._buffers.pop()

    def put(self, buf):
        buf.work = None
        with self._lock:
            self._buffers.append(buf)


class GradBucketer:
    def __init__(self, pool, size):
        self.pool = pool
        self.size = size
        self.open = None
        self.fill = 0
        self.launched = []
        self.norm = pool.get()  # clean: close puts it back

    def add(self, grad):
        flat = grad.reshape(-1)
        if self.open is None:
            self.open = self.pool.get()  # leak: begin_step sets the open bucket to None
            self.fill = 0
        end = min(self.fill + flat.numel(), self.size)
        self.open.tensor[self.fill:end] = flat[: end - self.fill]
        self.fill = end
        if self.fill >= self.size:
            self.launch()

    def launch(self):
        bucket, self.open = self.open, None
        if bucket is None:
            return
        bucket.work = dist.all_reduce(bucket.tensor, async_op=True)
        self.launched.append(bucket)

    def wait(self):
        total = 0.0
        for bucket in self.launched:
            bucket.work.wait()
            total += float(bucket.tensor.sum())
            self.pool.put(bucket)
        self.launched = []
        self.norm.tensor[0] = total
        return total

    def begin_step(self):
        self.wait()
        self.open = None
        self.fill = 0

    def broadcast(self, param, root):
        buf = self.pool.get()  # clean: put back after the broadcast
        buf.tensor[: param.numel()] = param.reshape(-1)
        dist.broadcast(buf.tensor, root)
        param.copy_(buf.tensor[: param.numel()].reshape(param.shape))
        self.pool.put(buf)

    def gather(self, shards):
        parts = {}
        for rank, shard in enumerate(shards):
            parts[rank] = self.pool.get()  # leak: the part of rank 0 is popped for the result and not put
            parts[rank].tensor[: shard.numel()] = shard
        own = parts.pop(0).tensor.clone()
        for part in parts.values():
            self.pool.put(part)
        return own

    def close(self):
        self.wait()
        self.pool.put(self.norm)
