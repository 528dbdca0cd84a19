"""Trainer -> sampler weight transfer through fixed-size staging buckets."""
import threading
from collections import defaultdict, deque
from typing import Iterator

import torch
import torch.distributed as dist

SLAB_BYTES = 64 << 20


class BucketPool:
    def __init__(self, nbytes: int, count: int, device: str = "cuda"):
        self.nbytes = nbytes
        self._ready = threading.Condition()
        self._free = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(count)]
        self._tagged: dict[int, str] = {}

    def rent(self) -> torch.Tensor:
        with self._ready:
            while not self._free:
                self._ready.wait()
            return self._free.pop()  # clean: returned to the caller

    def try_rent(self) -> torch.Tensor | None:
        with self._ready:
            return self._free.pop() if self._free else None  # clean: returned to the caller

    def rent_untagged(self) -> torch.Tensor | None:
        """A bucket that no peer reads any more."""
        with self._ready:
            if not self._free:
                return None
            bucket = self._free.pop()  # leak: a tagged bucket is off the free list and not returned either
            if bucket.data_ptr() in self._tagged:
                return None
            return bucket

    def tag(self, bucket: torch.Tensor, peer: str) -> None:
        self._tagged[bucket.data_ptr()] = peer

    def untag(self, bucket: torch.Tensor) -> None:
        self._tagged.pop(bucket.data_ptr(), None)

    def refund(self, bucket: torch.Tensor) -> None:
        with self._ready:
            self._free.append(bucket)
            self._ready.notify()


class VersionStore:
    """Reference counts of published weight versions."""

    def __init__(self):
        self._refs: dict[int, int] = defaultdict(int)
        self.latest = 0

    def hold(self, version: int) -> int:
        self._refs[version] += 1
        return version

    def let_go(self, version: int) -> None:
        self._refs[version] -= 1
        if self._refs[version] == 0:
            del self._refs[version]


class WeightSender:
    def __init__(self, pool: BucketPool, versions: VersionStore, group=None):
        self.pool = pool
        self.versions = versions
        self.group = group
        self.serving: int | None = None

    def pack(self, params: dict[str, torch.Tensor]) -> Iterator[tuple[torch.Tensor, list]]:
        """Yield filled buckets; the consumer refunds them."""
        bucket = self.pool.rent()  # leak: neither yielded nor refunded when there are no parameters
        index, off = [], 0
        for name, p in params.items():
            raw = p.detach().contiguous().view(torch.uint8).flatten()
            if off + raw.numel() > self.pool.nbytes:
                yield bucket, index
                bucket = self.pool.rent()  # clean: near miss, the bucket before was yielded and this one gets an index entry next
                index, off = [], 0
            bucket[off:off + raw.numel()].copy_(raw)
            index.append((name, off, p.shape, p.dtype))
            off += raw.numel()
        if index:
            yield bucket, index

    def broadcast(self, params: dict[str, torch.Tensor], depth: int = 2) -> int:
        inflight: deque = deque()
        sent = 0
        for bucket, index in self.pack(params):  # clean: each bucket is in inflight until its work is done, then refunded
            work = dist.broadcast(bucket, src=0, group=self.group, async_op=True)
            inflight.append((work, bucket))
            sent += len(index)
            while len(inflight) > depth:
                work, old = inflight.popleft()
                work.wait()
                self.pool.refund(old)
        while inflight:
            work, old = inflight.popleft()
            work.wait()
            self.pool.refund(old)
        return sent

    def send_to(self, rank: int, params: dict[str, torch.Tensor], wanted: set[str]) -> int:
        sent = 0
        for bucket, index in self.pack(params):  # leak: a bucket with nothing wanted in it is skipped without a refund
            keep = [e for e in index if e[0] in wanted]
            if not keep:
                continue
            dist.send(bucket, dst=rank, group=self.group)
            self.pool.refund(bucket)
            sent += len(keep)
        return sent

    def send_checked(self, rank: int, params: dict[str, torch.Tensor]) -> bool:
        ok = True
        for bucket, index in self.pack(params):  # clean: refunded in finally on both branches
            try:
                if not ok:
                    continue
                dist.send(bucket, dst=rank, group=self.group)
                ok = self._acked(rank, len(index))
            finally:
                self.pool.refund(bucket)
        return ok

    def _acked(self, rank: int, n: int) -> bool:
        flag = torch.zeros(1, dtype=torch.int32)
        dist.recv(flag, src=rank, group=self.group)
        return int(flag.item()) == n

    def _quantised(self, p: torch.Tensor) -> torch.Tensor:
        """int8 copy of ``p`` at the head of a rented bucket."""
        bucket = self.pool.rent()  # clean: returned to the caller, who refunds it
        scale = p.abs().amax().clamp(min=1e-8) / 127
        bucket[:p.numel()].copy_((p / scale).round().to(torch.int8).view(torch.uint8).flatten())
        return bucket

    def quantised_state(self, params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        state = {}
        for name, p in params.items():
            state[name] = self._quantised(p)[:p.numel()].cpu().view(p.shape)  # leak: only the CPU copy is kept, the bucket is dropped
        return state

    def publish(self, version: int) -> None:
        held = self.versions.hold(version)  # clean: near miss, kept in self.serving, whose version before is let go
        if self.serving is not None:
            self.versions.let_go(self.serving)
        self.serving = held
        self.versions.latest = version

    def replay(self, params: dict[str, torch.Tensor], version: int, ranks: list[int]) -> bool:
        """Send a version again to ranks that restarted."""
        held = self.versions.hold(version)  # leak: not let go when a rank does not acknowledge
        for rank in ranks:
            if not self.send_checked(rank, params):
                return False
        self.versions.let_go(held)
        return True


class WeightReceiver:
    def __init__(self, pool: BucketPool, model: torch.nn.Module, group=None):
        self.pool = pool
        self.params = dict(model.named_parameters())
        self.group = group

    def receive(self, headers: list[list[tuple]]) -> bool:
        for index in headers:
            bucket = self.pool.rent()  # leak: an unknown name returns before the refund
            dist.broadcast(bucket, src=0, group=self.group)
            for name, off, shape, dtype in index:
                target = self.params.get(name)
                if target is None or target.shape != shape:
                    return False
                n = target.numel() * target.element_size()
                target.data.copy_(bucket[off:off + n].view(dtype).view(shape))
            self.pool.refund(bucket)
        return True

    def receive_overlapped(self, headers: list[list[tuple]]) -> None:
        """Load one bucket while the next arrives."""
        cur = self.pool.rent()  # clean: near miss, only swapped with nxt, both are refunded in finally
        nxt = self.pool.try_rent()  # clean: refunded in finally when it was had
        try:
            if nxt is None:
                for index in headers:
                    dist.broadcast(cur, src=0, group=self.group)
                    self._load(cur, index)
                return
            work = dist.broadcast(cur, src=0, group=self.group, async_op=True)
            for i, index in enumerate(headers):
                work.wait()
                if i + 1 < len(headers):
                    work = dist.broadcast(nxt, src=0, group=self.group, async_op=True)
                self._load(cur, index)
                cur, nxt = nxt, cur
        finally:
            self.pool.refund(cur)
            if nxt is not None:
                self.pool.refund(nxt)

    def _load(self, bucket: torch.Tensor, index: list[tuple]) -> None:
        for name, off, shape, dtype in index:
            target = self.params[name]
            n = target.numel() * target.element_size()
            target.data.copy_(bucket[off:off + n].view(dtype).view(shape))
