"""Pinned host staging tensors for weight sync and offload, cached by (shape, dtype)."""
from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager
from typing import Dict, Iterable, Iterator, List, Optional, Tuple

import torch

Key = Tuple[Tuple[int, ...], torch.dtype]


class StagingFull(RuntimeError):
    pass


class PinnedCache:
    """At most ``cap`` tensors are out at once; the idle ones wait by key."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.out = 0
        self.idle: Dict[Key, List[torch.Tensor]] = {}
        self._mu = threading.Lock()

    def checkout(self, shape, dtype=torch.float16) -> torch.Tensor:
        key = (tuple(shape), dtype)
        with self._mu:
            if self.out >= self.cap:
                raise StagingFull(f"{self.out} staging tensors are out")
            self.out += 1
            stack = self.idle.get(key)
            if stack:
                return stack.pop()  # clean: returned to the caller
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def checkout_nowait(self, shape, dtype=torch.float16) -> Optional[torch.Tensor]:
        try:
            return self.checkout(shape, dtype)  # clean: returned to the caller
        except StagingFull:
            return None

    def give(self, t: torch.Tensor) -> None:
        with self._mu:
            self.out -= 1
            self.idle.setdefault((tuple(t.shape), t.dtype), []).append(t)

    @contextmanager
    def borrowed(self, shape, dtype=torch.float16) -> Iterator[torch.Tensor]:
        t = self.checkout(shape, dtype)  # clean: given back in the finally
        try:
            yield t
        finally:
            self.give(t)


class StagedWrite:
    """with StagedWrite(cache, param) as host: ..., then the host copy goes up."""

    def __init__(self, cache: PinnedCache, param: torch.Tensor, dry: bool = False) -> None:
        self.cache = cache
        self.param = param
        self.dry = dry
        self.host: Optional[torch.Tensor] = None

    def __enter__(self) -> torch.Tensor:
        self.host = self.cache.checkout(self.param.shape, self.param.dtype)  # leak: __exit__ returns early on an exception and never gives it
        return self.host

    def __exit__(self, et, ev, tb) -> bool:
        if et is not None:
            return False
        if not self.dry:
            self.param.copy_(self.host, non_blocking=False)
        self.cache.give(self.host)
        self.host = None
        return False


class StagedRead:
    def __init__(self, cache: PinnedCache, src: torch.Tensor) -> None:
        self.cache = cache
        self.src = src
        self.host: Optional[torch.Tensor] = None

    def __enter__(self) -> torch.Tensor:
        self.host = self.cache.checkout(self.src.shape, self.src.dtype)  # clean: near miss, __exit__ gives it before it looks at the error
        self.host.copy_(self.src)
        return self.host

    def __exit__(self, et, ev, tb) -> bool:
        self.cache.give(self.host)
        if et is not None:
            return False
        self.host = None
        return False


class WeightSync:
    def __init__(self, cache: PinnedCache, reader) -> None:
        self.cache = cache
        self.reader = reader
        self.inflight: Dict[str, torch.Tensor] = {}

    def load_param(self, name: str, param: torch.Tensor) -> bool:
        host = self.cache.checkout(param.shape, param.dtype)  # leak: an absent weight returns before the give
        n = self.reader.read_into(name, host)
        if n == 0:
            return False
        param.copy_(host)
        self.cache.give(host)
        return True

    def load_all(self, params: Dict[str, torch.Tensor]) -> List[str]:
        missing = []
        for name, p in params.items():
            with self.cache.borrowed(p.shape, p.dtype) as host:  # clean: the context manager gives it back, also past the continue
                if self.reader.read_into(name, host) == 0:
                    missing.append(name)
                    continue
                p.copy_(host)
        return missing

    def load_fused(self, names: List[str], param: torch.Tensor) -> None:
        shape = (param.shape[0] // len(names), *param.shape[1:])
        with ExitStack() as stack:
            parts = []
            for n in names:
                t = self.cache.checkout(shape, param.dtype)  # clean: near miss, the exit stack gives it
                stack.callback(self.cache.give, t)
                self.reader.read_into(n, t)
                parts.append(t)
            param.copy_(torch.cat(parts))

    def begin(self, name: str, param: torch.Tensor) -> bool:
        if name in self.inflight:
            return False
        host = self.cache.checkout_nowait(param.shape, param.dtype)  # clean: kept in self.inflight for finish() or cancel()
        if host is None:
            return False
        self.inflight[name] = host
        self.reader.start(name, host)
        return True

    def finish(self, name: str, param: torch.Tensor) -> None:
        host = self.inflight.pop(name)
        param.copy_(host)
        self.cache.give(host)

    def cancel(self) -> None:
        for host in self.inflight.values():
            self.cache.give(host)
        self.inflight.clear()

    def begin_urgent(self, name: str, param: torch.Tensor) -> bool:
        host = self.cache.checkout(param.shape, param.dtype)  # leak: a read of that name already under way returns with a second tensor out
        if name in self.inflight:
            return True
        self.inflight[name] = host
        self.reader.start(name, host)
        return False

    def load_quantized(self, name: str, param: torch.Tensor, scale: torch.Tensor) -> None:
        w = self.cache.checkout(param.shape, torch.int8)  # leak: StagingFull from the second checkout loses it
        s = self.cache.checkout(scale.shape, scale.dtype)  # clean: given in the finally
        try:
            self.reader.read_into(name, w)
            self.reader.read_into(name + ".scale", s)
            scale.copy_(s)
            param.copy_(w.to(param.dtype) * scale)
        finally:
            self.cache.give(s)
            self.cache.give(w)

    def load_with_bias(self, name: str, weight: torch.Tensor, bias: torch.Tensor) -> bool:
        w = self.cache.checkout_nowait(weight.shape, weight.dtype)  # clean: given on the rollback and in the finally
        if w is None:
            return False
        b = self.cache.checkout_nowait(bias.shape, bias.dtype)  # clean: given in the finally
        if b is None:
            self.cache.give(w)
            return False
        try:
            self.reader.read_into(name + ".weight", w)
            self.reader.read_into(name + ".bias", b)
            weight.copy_(w)
            bias.copy_(b)
            return True
        finally:
            self.cache.give(b)
            self.cache.give(w)

    def snapshot(self, params: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        for p in params:
            host = self.cache.checkout(p.shape, p.dtype)  # clean: near miss, the generator's finally runs at close too
            try:
                host.copy_(p)
                yield host
            finally:
                self.cache.give(host)

    def stream_out(self, params: Iterable[torch.Tensor], limit: int) -> Iterator[bytes]:
        sent = 0
        for p in params:
            host = self.cache.checkout(p.shape, p.dtype)  # leak: the limit ends the generator with the tensor still out
            host.copy_(p)
            raw = host.numpy().tobytes()
            sent += len(raw)
            if sent > limit:
                return
            self.cache.give(host)
            yield raw
