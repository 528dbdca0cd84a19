"""Staging buffers for cross-rank reductions of activations and logits."""
from __future__ import annotations

import logging
import threading
from typing import Sequence

import torch

logger = logging.getLogger(__name__)


class StagingPool:
    """Pre-allocated flat buffers of one size, lent one at a time."""

    def __init__(self, count: int, numel: int, dtype: torch.dtype = torch.float32) -> None:
        self.numel = numel
        self._lock = threading.Lock()
        self._idle = [torch.empty(numel, dtype=dtype) for _ in range(count)]
        self._lent: dict[int, torch.Tensor] = {}

    def acquire(self) -> torch.Tensor:
        with self._lock:
            if not self._idle:
                raise RuntimeError("staging pool exhausted")
            buf = self._idle.pop()  # clean: recorded as lent and returned
            self._lent[buf.data_ptr()] = buf
            return buf

    def try_acquire(self) -> torch.Tensor | None:
        with self._lock:
            if not self._idle:
                return None
            buf = self._idle.pop()  # clean: recorded as lent and returned
            self._lent[buf.data_ptr()] = buf
        return buf

    def release(self, buf: torch.Tensor) -> None:
        with self._lock:
            owned = self._lent.pop(buf.data_ptr(), None)
            if owned is None:
                logger.warning("release of a foreign buffer, ignored")
                return
            self._idle.append(owned)


class Reducer:
    """Averages per-rank shards through a staging buffer."""

    def __init__(self, pool: StagingPool, world_size: int) -> None:
        self.pool = pool
        self.world_size = world_size
        self._scratch: torch.Tensor | None = None

    def _sum_into_staging(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        out = self.pool.acquire()  # clean: handed to the caller
        out.zero_()
        for shard in shards:
            out[: shard.numel()] += shard.flatten()
        return out

    def mean(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Mean over ranks. The result is the caller's to keep."""
        out = self._sum_into_staging(shards)  # leak: rebound to the quotient, the release gets a foreign tensor
        out = out / self.world_size
        result = out[: shards[0].numel()].clone()
        self.pool.release(out)
        return result

    def mean_inplace(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        out = self._sum_into_staging(shards)  # clean: near miss, div_ works in place so the buffer itself is released
        out.div_(self.world_size)
        result = out[: shards[0].numel()].clone()
        self.pool.release(out)
        return result

    def total(self, shards: Sequence[torch.Tensor], dst: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, written to ``dst``."""
        dst.copy_(self._sum_into_staging(shards)[: dst.numel()].view_as(dst))  # leak: copied out of and dropped
        return dst

    def max_abs(self, shards: Sequence[torch.Tensor]) -> float:
        buf = self.pool.acquire()  # clean: released in the finally
        try:
            best = 0.0
            for shard in shards:
                n = shard.numel()
                buf[:n].copy_(shard.flatten())
                if n == 0:
                    return best
                best = max(best, float(buf[:n].abs().max()))
            return best
        finally:
            self.pool.release(buf)

    def checksum(self, shard: torch.Tensor) -> float:
        if shard.numel() == 0:
            return 0.0
        buf = self.pool.acquire()  # clean: near miss, the slice starts at the same address, by which release finds the buffer
        buf = buf[: shard.numel()]
        buf.copy_(shard.flatten())
        value = float(buf.double().sum())
        self.pool.release(buf)
        return value

    def framed(self, shard: torch.Tensor, header: int) -> torch.Tensor:
        """The payload as it looks behind a header of ``header`` elements."""
        buf = self.pool.acquire()  # leak: rebound to a slice at another address, which release ignores as foreign
        buf[:header].fill_(float(shard.numel()))
        buf = buf[header + 1 :]
        buf[: shard.numel()].copy_(shard.flatten())
        payload = buf[: shard.numel()].clone()
        self.pool.release(buf)
        return payload

    def scratch(self) -> torch.Tensor:
        """Long-lived scratch space, created on first use."""
        if self._scratch is None:
            self._scratch = self.pool.acquire()  # clean: near miss, taken once and given back by close
        return self._scratch

    def close(self) -> None:
        if self._scratch is not None:
            self.pool.release(self._scratch)
            self._scratch = None


class LogitsGatherer:
    """Collects vocab-parallel logits shards into one row."""

    def __init__(self, pool: StagingPool, vocab_size: int) -> None:
        self.pool = pool
        self.vocab_size = vocab_size

    def gather(self, parts: list[torch.Tensor], cast: torch.dtype | None = None) -> torch.Tensor:
        row = self.pool.acquire()  # clean: near miss, the cast result goes to another name
        offset = 0
        for part in parts:
            row[offset : offset + part.numel()] = part
            offset += part.numel()
        logits = row[: self.vocab_size].clone()
        if cast is not None:
            logits = logits.to(cast)
        self.pool.release(row)
        return logits

    def argmax(self, parts: list[torch.Tensor]) -> int:
        row = self.pool.try_acquire()  # leak: the empty-parts return drops the buffer
        if row is None:
            return int(torch.cat(parts).argmax())
        if not parts:
            return -1
        cat = torch.cat(parts, out=row[: sum(p.numel() for p in parts)])
        token = int(cat.argmax())
        self.pool.release(row)
        return token

    def top_token(self, parts: list[torch.Tensor], temperature: float) -> int:
        row = self.pool.try_acquire()  # clean: near miss, both tests depend on the same None
        if row is not None:
            flat = torch.cat(parts, out=row[: sum(p.numel() for p in parts)])
        else:
            flat = torch.cat(parts)
        flat = flat / max(temperature, 1e-5)
        token = int(torch.multinomial(flat.softmax(-1), 1))
        if row is not None:
            self.pool.release(row)
        return token
