"""Weight and activation quantisation through shared scratch buffers."""
from __future__ import annotations

import threading
from typing import Callable, Optional

import torch

_DTYPES = {torch.float32: 4, torch.float16: 2, torch.int8: 1, torch.uint8: 1, torch.int32: 4}


class ScratchPool:
    """Size-classed flat buffers; classes are powers of two elements."""

    def __init__(self, max_class: int = 28) -> None:
        self._max = max_class
        self._lock = threading.Lock()
        self._shelves: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self.outstanding = 0

    def obtain(self, n: int, dtype: torch.dtype) -> Optional[torch.Tensor]:
        cls = max(8, (n - 1).bit_length())
        if cls > self._max:
            return None
        with self._lock:
            self.outstanding += 1
            shelf = self._shelves.setdefault((cls, dtype), [])
            if shelf:
                return shelf.pop()
        return torch.empty(1 << cls, dtype=dtype)

    def surrender(self, buf: torch.Tensor) -> None:
        cls = (buf.numel() - 1).bit_length()
        with self._lock:
            self.outstanding -= 1
            self._shelves[(cls, buf.dtype)].append(buf)


_SCRATCH = ScratchPool()


def scratch(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    buf = _SCRATCH.obtain(n, dtype)  # clean: handed to the caller
    if buf is None:
        raise MemoryError(f"scratch request of {n} elements is over the limit")
    return buf


def done(buf: torch.Tensor) -> None:
    _SCRATCH.surrender(buf)


def _scratch_or(out: Optional[torch.Tensor], n: int, dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
    """The caller's buffer, or a scratch one and True."""
    if out is not None and out.numel() >= n and out.dtype == dtype:
        return out, False
    return scratch(n, dtype), True  # clean: handed to the caller together with the flag


def rowwise_int8(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, cols = w.shape
    work = scratch(rows * cols)  # clean: done before the return
    flat = work[: rows * cols].view(rows, cols)
    torch.abs(w, out=flat)
    scale = flat.amax(1).clamp_min(1e-8) / 127.0
    torch.div(w, scale.unsqueeze(1), out=flat)
    q = flat.round().clamp_(-127, 127).to(torch.int8)
    done(work)
    return q, scale


def blockwise_mx(w: torch.Tensor, block: int = 32) -> Optional[tuple[torch.Tensor, torch.Tensor]]:
    n = w.numel()
    amax = _SCRATCH.obtain(n // block, torch.float32)  # clean: near miss, None holds nothing
    if amax is None:
        return None
    view = amax[: n // block]
    torch.amax(w.view(-1, block).abs(), 1, out=view)
    exponent = view.log2().floor().clone()
    done(amax)
    q = w.view(-1, block) * torch.exp2(-exponent).unsqueeze(1)
    return q, exponent.to(torch.int8)


def dequantise(q: torch.Tensor, scale: torch.Tensor, out: Optional[torch.Tensor] = None) -> torch.Tensor:
    buf, owned = _scratch_or(out, q.numel(), torch.float32)  # clean: near miss, done when the flag says so
    dense = buf[: q.numel()].view(q.shape)
    torch.mul(q.float(), scale.unsqueeze(1), out=dense)
    result = dense.to(torch.float16)
    if owned:
        done(buf)
    return result


def quant_error(w: torch.Tensor, out: Optional[torch.Tensor] = None) -> float:
    q, scale = rowwise_int8(w)
    buf, _ = _scratch_or(out, w.numel(), torch.float32)  # leak: the flag is ignored, nobody surrenders it
    diff = buf[: w.numel()].view(w.shape)
    torch.mul(q.float(), scale.unsqueeze(1), out=diff)
    diff.sub_(w)
    return float(diff.square().mean())


def _unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Unpacked values in a scratch buffer, twice as long as ``packed``."""
    n = packed.numel() * 2
    buf = scratch(n, torch.uint8)  # clean: handed to the caller
    buf[0:n:2].copy_(packed & 0xF)
    buf[1:n:2].copy_(packed >> 4)
    return buf


def int4_matmul(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rows, cols = packed.shape[0], packed.shape[1] * 2
    wide = _unpack_nibbles(packed)[: rows * cols].float()  # leak: converted, the scratch itself is dropped
    w = (wide.view(rows, cols) - 8.0) * scale.unsqueeze(1)
    return x @ w.t()


def hessian_sweep(h: torch.Tensor, w: torch.Tensor, block: int) -> torch.Tensor:
    """Error-compensated rounding, column block by column block."""
    err = scratch(w.shape[0] * block)  # leak: overwritten by the next block's buffer
    out = w.clone()
    for lo in range(0, w.shape[1], block):
        cols = min(block, w.shape[1] - lo)
        e = err[: w.shape[0] * cols].view(w.shape[0], cols)
        q = out[:, lo:lo + cols].round()
        torch.sub(out[:, lo:lo + cols], q, out=e)
        out[:, lo:lo + cols] = q
        out[:, lo + cols:] -= e @ h[lo:lo + cols, lo + cols:]
        err = scratch(w.shape[0] * block)  # leak: all but the last are overwritten
    done(err)
    return out


def hessian_sweep_reuse(h: torch.Tensor, w: torch.Tensor, block: int) -> torch.Tensor:
    err = None
    out = w.clone()
    for lo in range(0, w.shape[1], block):
        cols = min(block, w.shape[1] - lo)
        if err is None:
            err = scratch(w.shape[0] * block)  # clean: near miss, taken once, done after the loop
        e = err[: w.shape[0] * cols].view(w.shape[0], cols)
        q = out[:, lo:lo + cols].round()
        torch.sub(out[:, lo:lo + cols], q, out=e)
        out[:, lo:lo + cols] = q
        out[:, lo + cols:] -= e @ h[lo:lo + cols, lo + cols:]
    if err is not None:
        done(err)
    return out


class Int4Packer:
    """Packs layer after layer; keeps its nibble buffer between layers."""

    def __init__(self) -> None:
        self._nibbles: Optional[torch.Tensor] = None

    def pack(self, q: torch.Tensor) -> torch.Tensor:
        if self._nibbles is None:
            self._nibbles = scratch(q.numel(), torch.uint8)  # leak: reset() forgets it between models
        flat = self._nibbles[: q.numel()]
        flat.copy_(q.flatten() + 8)
        return flat[0::2] | (flat[1::2] << 4)

    def reset(self) -> None:
        self._nibbles = None


class Calibrator:
    """Running min and max of activations in two scratch rows."""

    def __init__(self, width: int, on_done: Optional[Callable[[torch.Tensor], None]] = None) -> None:
        self._lo = scratch(width)  # clean: near miss, finish() is done with it
        self._hi = scratch(width)  # clean: near miss, finish() is done with it
        self._width = width
        self._on_done = on_done

    def observe(self, x: torch.Tensor) -> None:
        torch.minimum(self._lo[: self._width], x.amin(0), out=self._lo[: self._width])
        torch.maximum(self._hi[: self._width], x.amax(0), out=self._hi[: self._width])

    def finish(self) -> torch.Tensor:
        span = (self._hi - self._lo)[: self._width].clone()
        for buf in (self._lo, self._hi):
            done(buf)
        if self._on_done is not None:
            self._on_done(span)
        return span
