"""Trainer-to-rollout weight synchronisation through flat buckets and checkpoint shards."""
import json
import threading
from typing import Optional

import torch


class BucketRack:
    """Flat transfer buckets; a condition wakes waiters when one comes home."""

    def __init__(self, count: int, numel: int) -> None:
        self.numel = numel
        self._home = [torch.empty(numel) for _ in range(count)]
        self._changed = threading.Condition()

    def pull(self, timeout: Optional[float] = None) -> Optional[torch.Tensor]:
        with self._changed:
            if not self._changed.wait_for(lambda: self._home, timeout):
                return None
            return self._home.pop()

    def push(self, bucket: torch.Tensor) -> None:
        with self._changed:
            self._home.append(bucket)
            self._changed.notify()


class VersionGate:
    """Readers of the current weights; an update waits until none is inside."""

    def __init__(self) -> None:
        self._readers = 0
        self._cond = threading.Condition()

    def step_in(self) -> None:
        with self._cond:
            self._readers += 1

    def step_out(self) -> None:
        with self._cond:
            self._readers -= 1
            self._cond.notify_all()

    def wait_empty(self, timeout: float) -> bool:
        with self._cond:
            return self._cond.wait_for(lambda: self._readers == 0, timeout)


class WeightSender:
    def __init__(self, rack: BucketRack, group) -> None:
        self.rack = rack
        self.group = group
        self.in_air: list[tuple[object, torch.Tensor]] = []

    def broadcast(self, params: dict[str, torch.Tensor]) -> None:
        bucket, offset = self.rack.pull(), 0  # clean: near miss, last bucket is flushed behind the loop
        for param in params.values():
            if offset + param.numel() > self.rack.numel:
                self._flush(bucket, offset)
                bucket, offset = self.rack.pull(), 0  # clean: flushed before each rebinding and at the end
            bucket[offset:offset + param.numel()].copy_(param.flatten())
            offset += param.numel()
        self._flush(bucket, offset)

    def broadcast_lora(self, params: dict[str, torch.Tensor]) -> None:
        for name, param in params.items():
            bucket = self.rack.pull(timeout=1.0)  # leak: frozen parameters continue with the bucket pulled
            if bucket is None:
                break
            if not param.requires_grad:
                continue
            bucket[:param.numel()].copy_(param.flatten())
            self._flush(bucket, param.numel())

    def _flush(self, bucket: torch.Tensor, used: int) -> None:
        """Send the filled part; the bucket goes home on completion."""
        if used == 0:
            self.rack.push(bucket)
            return
        work = self.group.broadcast(bucket[:used], async_op=True)
        self.in_air.append((work, bucket))

    def settle(self) -> None:
        while self.in_air:
            work, bucket = self.in_air.pop()
            work.wait()
            self.rack.push(bucket)

    def norm(self, params: list[torch.Tensor]) -> float:
        bucket = self.rack.pull()  # leak: rebound to a clone, which is pushed instead
        offset = 0
        for param in params:
            bucket[offset:offset + param.numel()].copy_(param.flatten())
            offset += param.numel()
        bucket = bucket[:offset].clone()
        self.rack.push(bucket)
        return float(bucket.norm())


class RolloutWorker:
    def __init__(self, rack: BucketRack, gate: VersionGate, engine) -> None:
        self.rack, self.gate, self.engine = rack, gate, engine
        self.version = 0

    def generate(self, prompt: str, want: int) -> Optional[str]:
        self.gate.step_in()  # leak: a stale version returns without stepping out
        if self.version < want:
            return None
        text = self.engine.generate(prompt)
        self.gate.step_out()
        return text

    def generate_group(self, prompts: list[str]) -> list[str]:
        outputs = []
        for prompt in prompts:
            self.gate.step_in()  # clean: near miss, finally steps out on the continue too
            try:
                if len(prompt) > self.engine.max_len:
                    continue
                outputs.append(self.engine.generate(prompt))
            finally:
                self.gate.step_out()
        return outputs

    def receive(self, layout: dict[str, int]) -> bool:
        bucket = self.rack.pull(timeout=5.0)  # leak: readers still inside makes it return early
        if bucket is None:
            return False
        self.engine.recv(bucket)
        if not self.gate.wait_empty(timeout=30.0):
            return False
        self.engine.load_flat(bucket, layout)
        self.version += 1
        self.rack.push(bucket)
        return True

    def load_shards(self, index_path: str) -> int:
        with open(index_path) as index:  # clean: closed by the with statement
            names = json.load(index)["shards"]
        loaded = 0
        for name in names:
            shard = open(name, "rb")  # leak: an empty shard is skipped while open
            header = shard.read(8)
            if not header:
                continue
            self.engine.load_shard(header, shard.read())
            shard.close()
            loaded += 1
        return loaded

    def verify_shard(self, name: str, digest: str) -> bool:
        shard = open(name, "rb")  # clean: near miss, both branches close it
        if self.engine.cheap_digest(shard.read(64)) != digest[:8]:
            shard.close()
            return False
        same = self.engine.digest(shard.read()) == digest
        shard.close()
        return same
