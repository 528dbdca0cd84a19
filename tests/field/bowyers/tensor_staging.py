"""Pinned host staging for checkpoint upload and weight broadcast."""
from __future__ import annotations

import contextlib
import logging
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Iterable, Iterator, Optional

import torch

log = logging.getLogger(__name__)


def size_class(nbytes: int) -> int:
    cls = 1 << 12
    while cls < nbytes:
        cls <<= 1
    return cls


class StagingArena:
    """Pinned buffers by size class under one byte cap."""

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._made = 0
        self._shelves: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._out: dict[int, int] = {}
        self._mu = threading.Lock()

    def rent(self, nbytes: int) -> Optional[torch.Tensor]:
        cls = size_class(nbytes)
        with self._mu:
            if self._shelves[cls]:
                buf = self._shelves[cls].pop()
            elif self._made + cls <= self._cap:
                buf = torch.empty(cls, dtype=torch.uint8, pin_memory=True)
                self._made += cls
            else:
                return None
            self._out[buf.data_ptr()] = cls
            return buf

    def put_back(self, buf: torch.Tensor) -> None:
        with self._mu:
            cls = self._out.pop(buf.data_ptr())
            self._shelves[cls].append(buf)

    @contextlib.contextmanager
    def rented(self, nbytes: int) -> Iterator[Optional[torch.Tensor]]:
        buf = self.rent(nbytes)  # clean: put back in the finally
        try:
            yield buf
        finally:
            if buf is not None:
                self.put_back(buf)

    @contextlib.contextmanager
    def rented_or_plain(self, nbytes: int) -> Iterator[torch.Tensor]:
        buf = self.rent(nbytes)  # clean: near miss, goes back unless it is the plain one
        plain = buf is None
        block = torch.empty(nbytes, dtype=torch.uint8) if plain else buf
        try:
            yield block
        finally:
            if not plain:
                self.put_back(block)


def stage(arena: StagingArena, src: torch.Tensor) -> Optional[torch.Tensor]:
    """Host copy of a device tensor in a rented buffer; the caller puts the buffer back."""
    nbytes = src.numel() * src.element_size()
    buf = arena.rent(nbytes)  # clean: handed to the caller
    if buf is None:
        return None
    buf[:nbytes].copy_(src.contiguous().view(-1).view(torch.uint8), non_blocking=True)
    return buf


def checksum(arena: StagingArena, src: torch.Tensor) -> int:
    buf = stage(arena, src)  # leak: the buffer is summed and dropped
    if buf is None:
        return 0
    torch.cuda.current_stream().synchronize()
    return int(buf.to(torch.int64).sum().item())


def norm_on_host(arena: StagingArena, src: torch.Tensor) -> float:
    buf = stage(arena, src)  # clean: put back after the norm
    if buf is None:
        return float(src.norm())
    torch.cuda.current_stream().synchronize()
    value = float(buf[: src.numel() * src.element_size()].view(src.dtype).norm())
    arena.put_back(buf)
    return value


def widest(arena: StagingArena, tensors: Iterable[torch.Tensor]) -> Optional[torch.Tensor]:
    """One rented buffer that is large enough for each of the tensors."""
    buf: Optional[torch.Tensor] = None
    for t in tensors:
        need = t.numel() * t.element_size()
        if buf is None or buf.numel() < need:
            buf = arena.rent(need)  # leak: the smaller buffer is overwritten by the larger one
            if buf is None:
                return None
    return buf



def double_buffer(arena: StagingArena, shards: list[torch.Tensor], sink) -> int:
    """Write shards alternately from two buffers of the size of the first."""
    if not shards:
        return 0
    size = shards[0].numel() * shards[0].element_size()
    front = arena.rent(size)  # clean: put back at the end and without a back buffer
    if front is None:
        return 0
    back = arena.rent(size)  # clean: near miss, the names are swapped, both are put back
    if back is None:
        arena.put_back(front)
        return 0
    written = 0
    for shard in shards:
        front[:size].copy_(shard.contiguous().view(-1).view(torch.uint8))
        written += sink.write(memoryview(front[:size].numpy()))
        front, back = back, front
    arena.put_back(front)
    arena.put_back(back)
    return written


def ping_pong(arena: StagingArena, blocks: list[bytes], device: torch.device) -> list[torch.Tensor]:
    moved: list[torch.Tensor] = []
    current = arena.rent(1 << 20)  # clean: put back at the end, nothing held when None
    spare = arena.rent(1 << 20)  # leak: put back only when there was no current
    if current is None:
        if spare is not None:
            arena.put_back(spare)
        return moved
    for block in blocks:
        current[: len(block)].copy_(torch.frombuffer(bytearray(block), dtype=torch.uint8))
        moved.append(current[: len(block)].to(device))
    arena.put_back(current)
    return moved


@dataclass
class Upload:
    name: str
    nbytes: int
    buffer: Optional[torch.Tensor] = None
    done: bool = False


class CheckpointUploader:
    """begin() stages, poll() sends, and whatever has been sent is put back in reap()."""

    def __init__(self, arena: StagingArena, store) -> None:
        self.arena = arena
        self.store = store
        self.active: list[Upload] = []

    def begin(self, name: str, tensor: torch.Tensor) -> bool:
        buf = stage(self.arena, tensor)  # clean: near miss, rests in the upload until reap() or cancel_all()
        if buf is None:
            return False
        self.active.append(Upload(name, tensor.numel() * tensor.element_size(), buf))
        return True

    def poll(self) -> None:
        for up in self.active:
            if not up.done:
                self.store.put(up.name, up.buffer[: up.nbytes])
                up.done = True

    def reap(self) -> int:
        finished = [u for u in self.active if u.done]
        self.active = [u for u in self.active if not u.done]
        for up in finished:
            self.arena.put_back(up.buffer)
            up.buffer = None
        return len(finished)

    def cancel_all(self) -> None:
        for up in self.active:
            self.arena.put_back(up.buffer)
        self.active.clear()


@dataclass
class Broadcast:
    rank: int
    parts: dict[str, torch.Tensor] = field(default_factory=dict)


class WeightBroadcaster:
    """Stages the weights of a step for the ranks; a new step begins by begin_step()."""

    def __init__(self, arena: StagingArena) -> None:
        self.arena = arena
        self._current = Broadcast(rank=0)
        self.steps = 0

    def begin_step(self, rank: int) -> None:
        self._current = Broadcast(rank)
        self.steps += 1

    def add(self, name: str, weight: torch.Tensor) -> bool:
        buf = stage(self.arena, weight)  # leak: begin_step() replaces the parts, not put back
        if buf is None:
            return False
        self._current.parts[name] = buf
        return True

    def send(self, group) -> int:
        for name in sorted(self._current.parts):
            group.broadcast(self._current.parts[name], src=self._current.rank)
        return len(self._current.parts)


def save_state(arena: StagingArena, state: dict[str, torch.Tensor], path: str, compress: bool) -> int:
    total = 0
    with open(path, "wb") as out:  # clean: closed by the with
        for name, tensor in state.items():
            nbytes = tensor.numel() * tensor.element_size()
            with arena.rented(nbytes) as buf:  # clean: context manager puts it back
                if buf is None:
                    log.warning("no staging space for %s", name)
                    continue
                buf[:nbytes].copy_(tensor.contiguous().view(-1).view(torch.uint8))
                total += out.write(memoryview(buf[:nbytes].numpy()))
            scratch = None
            if compress:
                scratch = arena.rent(nbytes)  # leak: put back for large tensors only
            if compress and scratch is not None and nbytes > 4096:
                scratch[:nbytes].zero_()
                arena.put_back(scratch)
    return total


def load_into(arena: StagingArena, path: str, target: torch.Tensor) -> None:
    nbytes = target.numel() * target.element_size()
    src = open(path, "rb")  # clean: closed below
    data = src.read(nbytes)
    src.close()
    with arena.rented_or_plain(nbytes) as block:  # clean: context manager puts it back
        block[: len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        target.view(-1).view(torch.uint8).copy_(block[:nbytes])
