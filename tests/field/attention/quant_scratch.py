"""int8/int4 GEMM helpers which share dequantisation scratch."""

import contextlib
import threading
from typing import Iterator, List, NamedTuple, Optional

import torch


class QuantSpec(NamedTuple):
    bits: int
    group: int
    symmetric: bool = True


class Scratch:
    def __init__(self, nbytes: int, count: int):
        self._all = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(count)]
        self._avail = list(range(count))
        self._mu = threading.Lock()

    def checkout(self) -> int:
        with self._mu:
            if not self._avail:
                raise RuntimeError("no scratch left")
            return self._avail.pop()

    def checkin(self, slot: int) -> None:
        with self._mu:
            self._avail.append(slot)

    def data(self, slot: int) -> torch.Tensor:
        return self._all[slot]

    @contextlib.contextmanager
    def scoped(self) -> Iterator[torch.Tensor]:
        slot = self.checkout()  # clean: checked in by the finally of the context manager
        try:
            yield self._all[slot]
        finally:
            self.checkin(slot)

    def drain(self) -> int:
        self._mu.acquire()  # leak: the empty case returns with the mutex held
        if not self._avail:
            return 0
        n = len(self._avail)
        self._avail.clear()
        self._mu.release()
        return n

    def grow(self, extra: int, nbytes: int) -> None:
        self._mu.acquire()  # clean: released in the finally
        try:
            if extra <= 0:
                return
            base = len(self._all)
            for i in range(extra):
                self._all.append(torch.empty(nbytes, dtype=torch.uint8))
                self._avail.append(base + i)
        finally:
            self._mu.release()


def quantize_rows(w: torch.Tensor, spec: QuantSpec, scratch: Scratch) -> tuple:
    slot = scratch.checkout()  # clean: checked in before the return
    flat = w.reshape(-1, spec.group)
    scale = flat.abs().amax(dim=1, keepdim=True) / (2 ** (spec.bits - 1) - 1)
    q = scratch.data(slot)[: flat.numel()].view(torch.int8).view_as(flat)
    q.copy_((flat / scale).round())
    packed = q.clone()
    scratch.checkin(slot)
    return packed, scale


def quantize_asym(w: torch.Tensor, spec: QuantSpec, scratch: Scratch) -> Optional[tuple]:
    slot = scratch.checkout()  # leak: the symmetric early return forgets the slot
    if spec.symmetric:
        return None
    flat = w.reshape(-1, spec.group)
    lo, hi = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    scale = (hi - lo) / (2 ** spec.bits - 1)
    q = scratch.data(slot)[: flat.numel()].view_as(flat)
    q.copy_(((flat - lo) / scale).round())
    packed = q.clone()
    scratch.checkin(slot)
    return packed, scale, lo


class QuantLinear(torch.nn.Module):
    def __init__(self, qweight: torch.Tensor, scales: torch.Tensor, spec: QuantSpec, scratch: Scratch):
        super().__init__()
        self.register_buffer("qweight", qweight)
        self.register_buffer("scales", scales)
        self.spec = spec
        self.scratch = scratch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.scratch.scoped() as buf:  # clean: with statement
            w = buf[: self.qweight.numel() * 4].view(torch.float32).view_as(self.qweight)
            torch.mul(self.qweight, self.scales, out=w)
            return x @ w.t()

    def forward_bias(self, x: torch.Tensor, bias: Optional[torch.Tensor]) -> torch.Tensor:
        slot = self.scratch.checkout()  # clean: near miss, both ends of the if check in
        w = self.scratch.data(slot)[: self.qweight.numel() * 4].view(torch.float32).view_as(self.qweight)
        torch.mul(self.qweight, self.scales, out=w)
        if bias is None:
            y = x @ w.t()
            self.scratch.checkin(slot)
            return y
        y = torch.addmm(bias, x, w.t())
        self.scratch.checkin(slot)
        return y

    def calibrate(self, batches: List[torch.Tensor]) -> List[float]:
        errs: List[float] = []
        for x in batches:
            slot = self.scratch.checkout()  # leak: the raise for an odd shape leaves it checked out
            if x.shape[-1] % self.spec.group:
                raise ValueError(f"group {self.spec.group} does not divide {x.shape[-1]}")
            s = self.scratch.data(slot)
            errs.append(float(s[: x.numel()].float().std()))
            self.scratch.checkin(slot)
        return errs

    def fused_pair(self, other: "QuantLinear", x: torch.Tensor) -> torch.Tensor:
        a = self.scratch.checkout()  # clean: checked in at the end
        b = self.scratch.checkout()  # leak: the first slot is checked in twice, this one never
        wa = self.scratch.data(a)[: self.qweight.numel()].view(torch.int8).view_as(self.qweight)
        wb = self.scratch.data(b)[: other.qweight.numel()].view(torch.int8).view_as(other.qweight)
        wa.copy_(self.qweight)
        wb.copy_(other.qweight)
        y = (x @ wa.float().t()) * (x @ wb.float().t())
        self.scratch.checkin(a)
        self.scratch.checkin(a)
        return y


def open_scale_file(path: str, strict: bool) -> List[float]:
    f = open(path)  # leak: the lenient return leaves the file open
    head = f.readline()
    if not head.startswith("#scales"):
        if strict:
            f.close()
            raise ValueError(path)
        return []
    vals = [float(x) for x in f]
    f.close()
    return vals
