"""One stage of a 1F1B pipeline: schedule, point-to-point links and the pool of activation buffers."""
from __future__ import annotations

import collections
import logging
import time
from typing import Callable, Deque, Dict, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

log = logging.getLogger("pipeline")


class ActivationPool:
    """Fixed number of equally shaped activation buffers on one device."""

    def __init__(self, depth: int, shape: Sequence[int], dtype=torch.bfloat16, device: str = "cuda"):
        self.shape = tuple(shape)
        self._free: Deque[torch.Tensor] = collections.deque(
            torch.empty(self.shape, dtype=dtype, device=device) for _ in range(depth)
        )
        self._out: Dict[int, torch.Tensor] = {}

    def checkout(self) -> torch.Tensor:
        if not self._free:
            raise RuntimeError(f"activation pool exhausted ({len(self._out)} buffers out)")
        buf = self._free.popleft()
        self._out[id(buf)] = buf
        return buf

    def try_checkout(self) -> Optional[torch.Tensor]:
        if not self._free:
            return None
        return self.checkout()  # clean: handed on to the caller

    def checkin(self, buf: torch.Tensor) -> None:
        del self._out[id(buf)]
        self._free.append(buf)

    @property
    def outstanding(self) -> int:
        return len(self._out)


class StageLink:
    """Blocking transfers with the two neighbouring stages."""

    def __init__(self, pool: ActivationPool, prev_rank: Optional[int], next_rank: Optional[int]):
        self.pool = pool
        self.prev_rank = prev_rank
        self.next_rank = next_rank
        self.bytes_in = 0

    def recv_forward(self) -> torch.Tensor:
        buf = self.pool.checkout()  # clean: the buffer is returned to the caller
        if self.prev_rank is not None:
            dist.recv(buf, self.prev_rank)
            self.bytes_in += buf.numel() * buf.element_size()
        return buf

    def recv_backward(self) -> Optional[torch.Tensor]:
        if self.next_rank is None:
            return None
        buf = self.pool.checkout()  # clean: the buffer is returned to the caller
        dist.recv(buf, self.next_rank)
        self.bytes_in += buf.numel() * buf.element_size()
        return buf

    def send_forward(self, out: torch.Tensor) -> None:
        if self.next_rank is not None:
            dist.send(out.contiguous(), self.next_rank)

    def send_backward(self, grad: torch.Tensor) -> None:
        if self.prev_rank is not None:
            dist.send(grad.contiguous(), self.prev_rank)

    def swap_with_next(self, out: torch.Tensor) -> torch.Tensor:
        incoming = self.pool.checkout()  # clean: the buffer is returned to the caller
        ops = [
            dist.P2POp(dist.isend, out.contiguous(), self.next_rank),
            dist.P2POp(dist.irecv, incoming, self.next_rank),
        ]
        for req in dist.batch_isend_irecv(ops):
            req.wait()
        return incoming


class OneFOneB:
    def __init__(
        self,
        module: torch.nn.Module,
        link: StageLink,
        loss_fn: Optional[Callable[[torch.Tensor], torch.Tensor]],
        stage: int,
        num_stages: int,
    ):
        self.module = module
        self.link = link
        self.pool = link.pool
        self.loss_fn = loss_fn
        self.stage = stage
        self.num_stages = num_stages
        self.in_flight: Deque[Tuple[torch.Tensor, torch.Tensor]] = collections.deque()
        self.boundary_norms: List[float] = []

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    def _forward(self) -> None:
        x = self.link.recv_forward()  # clean: near miss, kept in in_flight, checked in by _backward or abort
        x.requires_grad_(self.stage > 0)
        y = self.module(x)
        if self.is_last:
            y = self.loss_fn(y)
        else:
            self.link.send_forward(y.detach())
        self.in_flight.append((x, y))

    def _backward(self) -> None:
        x, y = self.in_flight.popleft()
        grad = self.link.recv_backward()  # clean: None on the last stage, checked in under the same test
        torch.autograd.backward(y, grad)
        if x.grad is not None:
            self.link.send_backward(x.grad)
        if grad is not None:
            self.pool.checkin(grad)
        x.grad = None
        self.pool.checkin(x.detach_())

    def step(self, microbatches: int) -> None:
        warmup = min(self.num_stages - self.stage - 1, microbatches)
        for _ in range(warmup):
            self._forward()
        for _ in range(microbatches - warmup):
            self._forward()
            self._backward()
        while self.in_flight:
            self._backward()

    def abort(self) -> None:
        while self.in_flight:
            x, _ = self.in_flight.pop()
            self.pool.checkin(x)
        log.warning("stage %d aborted, %d buffers still out", self.stage, self.pool.outstanding)

    @torch.no_grad()
    def evaluate(self, microbatches: int) -> List[float]:
        losses: List[float] = []
        for _ in range(microbatches):
            x = self.link.recv_forward()  # leak: continue on every stage but the last skips the checkin
            y = self.module(x)
            if not self.is_last:
                self.link.send_forward(y)
                continue
            losses.append(float(self.loss_fn(y)))
            self.pool.checkin(x)
        return losses

    def profile_forward(self, repeats: int) -> float:
        """Seconds of the fastest of several forwards on random input."""
        best = float("inf")
        probe = None
        for seed in range(repeats):
            probe = self.pool.checkout()  # leak: rebound in each turn, only the last one is checked in
            probe.normal_(generator=torch.Generator("cuda").manual_seed(seed))
            torch.cuda.synchronize()
            start = time.perf_counter()
            self.module(probe)
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
        if probe is not None:
            self.pool.checkin(probe)
        return best

    def record_boundary_norm(self, out: torch.Tensor) -> float:
        peer = self.link.swap_with_next(out)  # leak: reduced to a norm and dropped
        norm = float(torch.linalg.vector_norm(peer.float() - out.float()))
        self.boundary_norms.append(norm)
        return norm

    def check_link(self) -> bool:
        """Echoes a pattern over the forward link, if two buffers are to spare."""
        pattern = self.pool.try_checkout()  # leak: not checked in when the second buffer is missing
        if pattern is None:
            return False
        expect = self.pool.try_checkout()  # clean: None or checked in at the end
        if expect is None:
            log.info("link check skipped on stage %d", self.stage)
            return False
        pattern.fill_(float(self.stage))
        expect.copy_(pattern)
        self.link.send_forward(pattern)
        same = bool(torch.equal(pattern, expect))
        self.pool.checkin(expect)
        self.pool.checkin(pattern)
        return same


class RecomputeStash:
    """Inputs kept for activation recomputation, by microbatch number."""

    def __init__(self, pool: ActivationPool):
        self.pool = pool
        self._inputs: Dict[int, torch.Tensor] = {}
        self._shadow: Dict[int, torch.Tensor] = {}

    def save(self, mb: int, x: torch.Tensor, keep_shadow: bool) -> None:
        slot = self.pool.checkout()  # clean: in _inputs, both replay and discard check it in
        slot.copy_(x)
        self._inputs[mb] = slot
        if keep_shadow:
            twin = self.pool.checkout()  # leak: discard removes the shadow entry and drops the buffer
            twin.copy_(x)
            self._shadow[mb] = twin

    def replay(self, mb: int, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = self._inputs.pop(mb)
        out = fn(x)
        self.pool.checkin(x)
        twin = self._shadow.pop(mb, None)
        if twin is not None:
            self.pool.checkin(twin)
        return out

    def discard(self, mb: int) -> None:
        x = self._inputs.pop(mb, None)
        if x is not None:
            self.pool.checkin(x)
        if self._shadow.pop(mb, None) is not None:
            log.debug("shadow of microbatch %d discarded", mb)
