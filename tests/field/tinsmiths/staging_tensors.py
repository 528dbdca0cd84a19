"""Host and device staging tensors, cached by shape and dtype."""
from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any, Dict, Iterable, List, Optional, Tuple

import torch

Key = Tuple[Tuple[int, ...], torch.dtype]


class ShapeCache:
    """Tensors by (shape, dtype). rent() may allocate, hand_in() keeps up to `cap` of a key."""

    def __init__(self, device: str = "cpu", pin: bool = False, cap: int = 32) -> None:
        self.device = device
        self.pin = pin
        self.cap = cap
        self._bins: Dict[Key, List[torch.Tensor]] = defaultdict(list)
        self._lock = threading.Lock()
        self.live = 0

    def rent(self, shape: Iterable[int], dtype: torch.dtype = torch.float16) -> torch.Tensor:
        key = (tuple(shape), dtype)
        with self._lock:
            self.live += 1
            if self._bins[key]:
                return self._bins[key].pop()
        return torch.empty(key[0], dtype=dtype, device=self.device, pin_memory=self.pin)

    def try_rent(self, shape: Iterable[int], dtype: torch.dtype = torch.float16) -> Optional[torch.Tensor]:
        """Only what is cached already."""
        key = (tuple(shape), dtype)
        with self._lock:
            if not self._bins[key]:
                return None
            self.live += 1
            return self._bins[key].pop()

    def hand_in(self, t: torch.Tensor) -> None:
        with self._lock:
            self.live -= 1
            lst = self._bins[(tuple(t.shape), t.dtype)]
            if len(lst) < self.cap:
                lst.append(t)

    def rent_like(self, t: torch.Tensor) -> torch.Tensor:
        return self.rent(t.shape, t.dtype)  # clean: returned

    def rent_zeroed(self, shape: Iterable[int]) -> torch.Tensor:
        t = self.try_rent(shape)  # clean: near miss, rent() is asked only when this gave None
        if t is None:
            t = self.rent(shape)  # clean: returned
        return t.zero_()


class Stager:
    def __init__(self, host: ShapeCache, dev: ShapeCache, world: int = 1, rank: int = 0) -> None:
        self.host = host
        self.dev = dev
        self.world = world
        self.rank = rank
        self._retained: List[torch.Tensor] = []
        self._by_layer: Dict[int, torch.Tensor] = {}
        self.overlap = world > 1

    def gather_rows(self, kv: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        out = self.dev.rent((rows.numel(), kv.shape[1]), kv.dtype)  # clean: returned to the caller
        torch.index_select(kv, 0, rows, out=out)
        return out

    def offload(self, kv: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        picked = self.gather_rows(kv, rows)  # leak: the pooled rows are copied to the host and dropped
        return picked.to("cpu", copy=True)

    def offload_into(self, kv: torch.Tensor, rows: torch.Tensor, dst: torch.Tensor) -> None:
        picked = self.gather_rows(kv, rows)  # clean: handed in after the copy
        dst.copy_(picked)
        self.dev.hand_in(picked)

    def checksum(self, kv: torch.Tensor, rows: torch.Tensor) -> float:
        return float(self.gather_rows(kv, rows).sum())  # leak: the pooled rows are summed and dropped

    def checksum_layers(self, layers: List[torch.Tensor], rows: torch.Tensor) -> List[float]:
        sums = []
        for kv in layers:
            t = self.gather_rows(kv, rows)  # clean: handed in on each turn
            sums.append(float(t.sum()))
            self.dev.hand_in(t)
        return sums

    def upload(self, src: torch.Tensor, target: torch.Tensor) -> bool:
        bounce = self.host.rent_like(src)  # leak: not handed in when the sizes differ
        bounce.copy_(src)
        if bounce.numel() != target.numel():
            return False
        target.view(-1).copy_(bounce.view(-1), non_blocking=self.overlap)
        self.host.hand_in(bounce)
        return True

    def upload_checked(self, src: torch.Tensor, target: torch.Tensor) -> bool:
        if src.numel() != target.numel():
            return False
        bounce = self.host.rent_like(src)  # clean: handed in at the end
        bounce.copy_(src)
        target.view(-1).copy_(bounce.view(-1))
        self.host.hand_in(bounce)
        return True

    def stage_layer(self, layer: int, kv: torch.Tensor) -> None:
        buf = self.dev.rent_like(kv)  # clean: in _by_layer until take_layer() or clear()
        buf.copy_(kv)
        old = self._by_layer.get(layer)
        if old is not None:
            self.dev.hand_in(old)
        self._by_layer[layer] = buf

    def take_layer(self, layer: int, dst: torch.Tensor) -> None:
        buf = self._by_layer.pop(layer, None)
        if buf is None:
            return
        dst.copy_(buf)
        self.dev.hand_in(buf)

    def clear(self) -> None:
        for buf in self._by_layer.values():
            self.dev.hand_in(buf)
        self._by_layer.clear()
        for buf in self._retained:
            self.dev.hand_in(buf)
        self._retained.clear()

    def all_reduce(self, x: torch.Tensor, group: Any) -> torch.Tensor:
        if self.world > 1:
            tmp = self.dev.rent_like(x)  # clean: near miss, handed in under the same world > 1 below
            tmp.copy_(x)
        else:
            tmp = x
        group.all_reduce(tmp)
        out = tmp.clone()
        if self.world > 1:
            self.dev.hand_in(tmp)
        return out

    def broadcast(self, x: torch.Tensor, group: Any) -> torch.Tensor:
        tmp = None
        if self.world > 1:
            tmp = self.dev.rent_like(x)  # leak: handed in on rank 0 only
            if self.rank == 0:
                tmp.copy_(x)
            group.broadcast(tmp, 0)
            out = tmp.clone()
        else:
            out = x.clone()
        if self.rank == 0 and tmp is not None:
            self.dev.hand_in(tmp)
        return out

    def concat(self, parts: List[torch.Tensor]) -> torch.Tensor:
        """Concatenate in a pooled tensor that the stager keeps until clear()."""
        n = sum(p.shape[0] for p in parts)
        out = self.dev.rent((n,) + tuple(parts[0].shape[1:]), parts[0].dtype)  # clean: near miss, in _retained until clear()
        torch.cat(parts, out=out)
        self._retained.append(out)
        return out

    def dequant(self, q: torch.Tensor, scale: torch.Tensor, keep: bool = False) -> torch.Tensor:
        tmp = self.dev.rent(q.shape, torch.float32)  # clean: near miss, retained or handed in by keep
        torch.mul(q.float(), scale, out=tmp)
        if keep:
            self._retained.append(tmp)
            return tmp
        res = tmp.half()
        self.dev.hand_in(tmp)
        return res

    def running_max(self, chunks: Iterable[torch.Tensor]) -> Optional[torch.Tensor]:
        acc: Optional[torch.Tensor] = None
        for c in chunks:
            nxt = self.dev.rent_like(c)  # leak: the former acc is replaced without being handed in
            if acc is None:
                nxt.copy_(c)
            else:
                torch.maximum(acc, c, out=nxt)
            acc = nxt
        if acc is None:
            return None
        res = acc.clone()
        self.dev.hand_in(acc)
        return res

    def running_sum(self, chunks: Iterable[torch.Tensor]) -> Optional[torch.Tensor]:
        acc: Optional[torch.Tensor] = None
        for c in chunks:
            nxt = self.dev.rent_like(c)  # clean: near miss, the former acc is handed in before it's replaced
            if acc is None:
                nxt.copy_(c)
            else:
                torch.add(acc, c, out=nxt)
                self.dev.hand_in(acc)
            acc = nxt
        if acc is None:
            return None
        res = acc.clone()
        self.dev.hand_in(acc)
        return res
