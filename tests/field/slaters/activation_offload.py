"""CPU offload of saved activations through pinned staging buffers."""
from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple

try:
    import torch
except ImportError:  # unit tests run without torch
    torch = None


class PinnedBlock:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        if torch is not None and torch.cuda.is_available():
            self.storage: Any = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        else:
            self.storage = bytearray(nbytes)


class PinnedPool:
    def __init__(self, block_bytes: int, blocks: int) -> None:
        self.block_bytes = block_bytes
        self._idle: Deque[PinnedBlock] = deque(PinnedBlock(block_bytes) for _ in range(blocks))
        self._mutex = threading.Lock()
        self.outstanding = 0

    def borrow(self, nbytes: int) -> Optional[PinnedBlock]:
        with self._mutex:
            if nbytes > self.block_bytes or not self._idle:
                return None
            self.outstanding += 1
            return self._idle.popleft()

    def give_back(self, block: PinnedBlock) -> None:
        with self._mutex:
            self.outstanding -= 1
            self._idle.append(block)


@dataclass
class SavedActivation:
    nbytes: int
    on_cpu: bool
    payload: Any = None
    block: Optional[PinnedBlock] = None


class SavedTensorHooks:
    """pack/unpack pair for torch.autograd.graph.saved_tensors_hooks."""

    def __init__(self, pool: PinnedPool, min_bytes: int = 64) -> None:
        self.pool = pool
        self.min_bytes = min_bytes

    def pack(self, tensor: bytes) -> SavedActivation:
        n = len(tensor)
        if n < self.min_bytes:
            return SavedActivation(n, on_cpu=False, payload=tensor)
        block = self.pool.borrow(n)  # clean: near miss, moved into the record and given back in unpack
        if block is None:
            return SavedActivation(n, on_cpu=False, payload=tensor)
        block.storage[:n] = tensor
        return SavedActivation(n, on_cpu=True, block=block)

    def unpack(self, saved: SavedActivation) -> bytes:
        if not saved.on_cpu:
            return saved.payload
        data = bytes(saved.block.storage[:saved.nbytes])
        self.pool.give_back(saved.block)
        saved.block = None
        return data


class LayerOffloader:
    """Offloads the input of each checkpointed layer; used by selective recompute."""

    def __init__(self, pool: PinnedPool, keep_last: int = 1) -> None:
        self.pool = pool
        self.keep_last = keep_last
        self.table: Dict[int, Tuple[PinnedBlock, int]] = {}
        self.on_device: Dict[int, bytes] = {}

    def offload(self, layer: int, num_layers: int, x: bytes) -> None:
        block = self.pool.borrow(len(x))  # leak: last layers stay on the device and the block is not given back
        if block is None:
            self.on_device[layer] = x
            return
        if layer >= num_layers - self.keep_last:
            self.on_device[layer] = x
            return
        block.storage[:len(x)] = x
        self.table[layer] = (block, len(x))

    def reload(self, layer: int) -> bytes:
        if layer in self.on_device:
            return self.on_device.pop(layer)
        block, n = self.table.pop(layer)
        data = bytes(block.storage[:n])
        self.pool.give_back(block)
        return data


@dataclass
class CopyTask:
    block: PinnedBlock
    nbytes: int
    done: Callable[[PinnedBlock], None]


@dataclass
class CopyEngine:
    """Stands in for the side stream; drained at the end of each step."""

    queue: List[CopyTask] = field(default_factory=list)

    def submit(self, task: CopyTask) -> None:
        self.queue.append(task)

    def drain(self) -> int:
        n = 0
        while self.queue:
            task = self.queue.pop(0)
            task.done(task.block)
            n += task.nbytes
        return n


class GradOffloader:
    def __init__(self, pool: PinnedPool, engine: CopyEngine) -> None:
        self.pool = pool
        self.engine = engine
        self.host_grads: Dict[str, bytes] = {}

    def push(self, name: str, grad: bytes) -> bool:
        block = self.pool.borrow(len(grad))  # clean: given back by the completion callback
        if block is None:
            return False
        block.storage[:len(grad)] = grad
        self.engine.submit(CopyTask(block, len(grad), self.pool.give_back))
        self.host_grads[name] = grad
        return True

    def accumulate(self, name: str, grad: bytes) -> bool:
        block = self.pool.borrow(len(grad))  # leak: the callback only records the copy
        if block is None:
            return False
        block.storage[:len(grad)] = grad
        self.engine.submit(CopyTask(block, len(grad), lambda b: self._merge(name, b, len(grad))))
        return True

    def _merge(self, name: str, block: PinnedBlock, n: int) -> None:
        old = self.host_grads.get(name)
        new = bytes(block.storage[:n])
        if old is not None:
            new = bytes((a + b) & 0xFF for a, b in zip(old, new))
        self.host_grads[name] = new


class DoubleBuffer:
    """Two blocks that alternate between compute and copy."""

    def __init__(self, pool: PinnedPool, nbytes: int) -> None:
        self.pool = pool
        self.nbytes = nbytes
        self.front: Optional[PinnedBlock] = None
        self.back: Optional[PinnedBlock] = None

    def open(self) -> bool:
        self.front = self.pool.borrow(self.nbytes)  # clean: near miss, rolled back when the second one fails, else close
        if self.front is None:
            return False
        self.back = self.pool.borrow(self.nbytes)  # clean: given back by close
        if self.back is None:
            self.pool.give_back(self.front)
            self.front = None
            return False
        return True

    def grow(self, nbytes: int) -> bool:
        bigger = self.pool.borrow(nbytes)  # leak: the old front is given back, this one not when the second borrow fails
        if bigger is None:
            return False
        other = self.pool.borrow(nbytes)  # clean: becomes the back block
        if other is None:
            return False
        self.close()
        self.front, self.back, self.nbytes = bigger, other, nbytes
        return True

    def flip(self) -> None:
        self.front, self.back = self.back, self.front

    def close(self) -> None:
        for block in (self.front, self.back):
            if block is not None:
                self.pool.give_back(block)
        self.front = self.back = None


def stage_with_retry(pool: PinnedPool, payload: bytes, write: Callable[[PinnedBlock], bool], attempts: int = 3) -> bool:
    for _ in range(attempts):
        block = pool.borrow(len(payload))  # leak: a failed write goes round with the block still held
        if block is None:
            continue
        block.storage[:len(payload)] = payload
        if write(block):
            pool.give_back(block)
            return True
    return False


def stage_or_wait(pool: PinnedPool, payload: bytes, engine: CopyEngine) -> Optional[int]:
    block = pool.borrow(len(payload))  # clean: near miss, rebound only when it was None
    while block is None and engine.queue:
        engine.drain()
        block = pool.borrow(len(payload))  # clean: loop ends as soon as there is one, given back below
    if block is None:
        return None
    try:
        block.storage[:len(payload)] = payload
        return sum(payload)
    finally:
        pool.give_back(block)


def main() -> None:
    pool = PinnedPool(256, 16)
    hooks = SavedTensorHooks(pool)
    saved = [hooks.pack(bytes([i]) * 100) for i in range(3)]  # clean: every record goes through unpack
    assert [hooks.unpack(s)[0] for s in saved] == [0, 1, 2]
    off = LayerOffloader(pool)
    for i in range(4):
        off.offload(i, 4, b"a" * 32)
    for i in reversed(range(4)):
        off.reload(i)
    engine = CopyEngine()
    grads = GradOffloader(pool, engine)
    grads.push("w", b"\x01" * 16)
    grads.accumulate("w", b"\x02" * 16)
    engine.drain()
    db = DoubleBuffer(pool, 128)
    if db.open():  # clean: closed below
        db.flip()
        db.grow(200)
        db.close()
    stage_with_retry(pool, b"abc", lambda b: True)
    stage_or_wait(pool, b"abc", engine)
    print("outstanding", pool.outstanding)


if __name__ == "__main__":
    main()
