"""Pinned host tensors and CUDA events for asynchronous copies."""
from __future__ import annotations

import threading
from collections import defaultdict
from typing import Dict, Iterator, List, Optional, Tuple

import torch


class PinnedPool:
    """Size-bucketed pinned tensors. get() may allocate, put() keeps for reuse."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.live_bytes = 0
        self._buckets: Dict[int, List[torch.Tensor]] = defaultdict(list)
        self._mu = threading.Lock()

    @staticmethod
    def _bucket(nbytes: int) -> int:
        size = 4096
        while size < nbytes:
            size <<= 1
        return size

    def get(self, nbytes: int) -> Optional[torch.Tensor]:
        size = self._bucket(nbytes)
        with self._mu:
            if self._buckets[size]:
                return self._buckets[size].pop()
            if self.live_bytes + size > self.max_bytes:
                return None
            self.live_bytes += size
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def put(self, tensor: torch.Tensor) -> None:
        with self._mu:
            self._buckets[tensor.numel()].append(tensor)


class EventPool:
    def __init__(self) -> None:
        self._idle: List[torch.cuda.Event] = []

    def lease(self) -> torch.cuda.Event:
        return self._idle.pop() if self._idle else torch.cuda.Event()

    def end(self, event: torch.cuda.Event) -> None:
        self._idle.append(event)


class StagingCopier:
    def __init__(self, pool: PinnedPool, events: EventPool, stream: torch.cuda.Stream) -> None:
        self.pool = pool
        self.events = events
        self.stream = stream
        self._pending: List[Tuple[torch.cuda.Event, torch.Tensor]] = []
        self._snapshots: List[torch.Tensor] = []

    # -- helpers that hand their lease on ------------------------------

    def _to_host(self, src: torch.Tensor) -> torch.Tensor:
        nbytes = src.numel() * src.element_size()
        host = self.pool.get(nbytes)  # clean: near miss, None gets a stand-in, else handed on
        if host is None:
            return torch.empty(0, dtype=torch.uint8)
        host[:nbytes].copy_(src.view(torch.uint8).flatten(), non_blocking=True)
        return host

    def _to_host_synced(self, src: torch.Tensor) -> torch.Tensor:
        host = self._to_host(src)  # clean: wrapper of a wrapper, handed on
        self.stream.synchronize()
        return host

    # -- uploads -------------------------------------------------------

    def upload(self, data: bytes, dst: torch.Tensor) -> bool:
        host = self.pool.get(len(data))  # clean: waits in _pending, reap() puts it back
        if host is None:
            return False
        host[:len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        with torch.cuda.stream(self.stream):
            dst.view(torch.uint8).flatten()[:len(data)].copy_(host[:len(data)], non_blocking=True)
            event = self.events.lease()  # clean: waits in _pending, reap() ends it
            event.record(self.stream)
        self._pending.append((event, host))
        return True

    def reap(self) -> int:
        still: List[Tuple[torch.cuda.Event, torch.Tensor]] = []
        for event, host in self._pending:
            if event.query():
                self.pool.put(host)
                self.events.end(event)
            else:
                still.append((event, host))
        done = len(self._pending) - len(still)
        self._pending = still
        return done

    def upload_blocking(self, data: bytes, dst: torch.Tensor) -> None:
        host = self.pool.get(len(data))  # clean: near miss, put back only on the branch that has one
        if host is None:
            dst.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        else:
            host[:len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            dst.copy_(host[:len(data)])
            self.pool.put(host)

    def timed_upload(self, host: torch.Tensor, dst: torch.Tensor) -> float:
        start = self.events.lease()  # clean: ended below
        stop = self.events.lease()  # leak: only start goes back to the event pool
        start.record(self.stream)
        dst.copy_(host[:dst.numel()], non_blocking=True)
        stop.record(self.stream)
        stop.synchronize()
        millis = start.elapsed_time(stop)
        self.events.end(start)
        return millis

    # -- downloads -----------------------------------------------------

    def logits_to_list(self, logits: torch.Tensor) -> List[float]:
        host = self._to_host_synced(logits)  # leak: copied into a list, the pooled tensor is dropped
        nbytes = logits.numel() * logits.element_size()
        return host[:nbytes].view(logits.dtype).tolist()

    def tokens_to_list(self, tokens: torch.Tensor) -> List[int]:
        host = self._to_host_synced(tokens)  # clean: put back after the copy when it came from the pool
        nbytes = tokens.numel() * tokens.element_size()
        if host.numel() == 0:
            return tokens.tolist()
        out = host[:nbytes].view(tokens.dtype).tolist()
        self.pool.put(host)
        return out

    def top_logprobs(self, logprobs: torch.Tensor, k: int) -> torch.Tensor:
        values, _ = logprobs.topk(k)
        host = self._to_host_synced(values)  # leak: clone() is returned, the pooled original is dropped
        nbytes = values.numel() * values.element_size()
        return host[:nbytes].view(values.dtype).clone()

    def snapshot(self, state: torch.Tensor) -> int:
        host = self._to_host(state)  # clean: near miss, kept in _snapshots, clear_snapshots() puts them back
        if host.numel() == 0:
            return -1
        self._snapshots.append(host)
        return len(self._snapshots) - 1

    def clear_snapshots(self) -> None:
        while self._snapshots:
            self.pool.put(self._snapshots.pop())

    def chunks(self, src: torch.Tensor, step: int) -> Iterator[bytes]:
        """Streams a device tensor to the host through one buffer."""
        host = self.pool.get(step)  # clean: near miss, finally puts it back though the consumer may stop
        if host is None:
            return
        try:
            flat = src.view(torch.uint8).flatten()
            for begin in range(0, flat.numel(), step):
                part = flat[begin:begin + step]
                host[:part.numel()].copy_(part)
                yield host[:part.numel()].numpy().tobytes()
        finally:
            self.pool.put(host)

    def merge_rows(self, rows: List[torch.Tensor]) -> Optional[torch.Tensor]:
        """Concatenates rows in host memory; None when no row is finite."""
        total = sum(r.numel() * r.element_size() for r in rows)
        merged = self.pool.get(total)  # leak: not put back when no row turned out finite
        if merged is None:
            return None
        pos = 0
        for row in rows:
            if not bool(torch.isfinite(row).all()):
                continue
            nbytes = row.numel() * row.element_size()
            merged[pos:pos + nbytes].copy_(row.view(torch.uint8).flatten())
            pos += nbytes
        if pos == 0:
            return None
        out = merged[:pos].clone()
        self.pool.put(merged)
        return out

    def ping_pong(self, parts: List[bytes], dst: torch.Tensor) -> int:
        """Double buffering."""
        previous: Optional[torch.Tensor] = None
        offset = 0
        for part in parts:
            current = self.pool.get(len(part))  # clean: near miss, put next round or at the end
            if current is None:
                break
            current[:len(part)] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
            dst[offset:offset + len(part)].copy_(current[:len(part)], non_blocking=True)
            offset += len(part)
            if previous is not None:
                self.stream.synchronize()
                self.pool.put(previous)
            previous = current
        if previous is not None:
            self.stream.synchronize()
            self.pool.put(previous)
        return offset


class WarmSet:
    """Buffers taken at start-up so that the first requests do not allocate."""

    def __init__(self, pool: PinnedPool, sizes: List[int]) -> None:
        self.pool = pool
        self.buffers: Dict[int, torch.Tensor] = {}
        for size in sizes:
            tensor = pool.get(size)  # leak: repeated sizes overwrite an entry of the dict
            if tensor is not None:
                self.buffers[size] = tensor

    def close(self) -> None:
        for tensor in self.buffers.values():
            self.pool.put(tensor)
        self.buffers.clear()
