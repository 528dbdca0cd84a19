"""Expert-parallel dispatch with capacity slots and pooled token buffers."""
import asyncio

import torch
from torch import nn
import torch.distributed as dist


class CapacityCounter:
    def __init__(self, per_expert):
        self.left = dict(per_expert)

    def try_draw(self, expert, n):
        if self.left[expert] < n:
            return False
        self.left[expert] -= n  # clean: the drawn capacity belongs to the caller
        return True

    def refund(self, expert, n):
        self.left[expert] += n


class TokenBufferDepot:
    def __init__(self, width, max_tokens):
        self.width = width
        self.max_tokens = max_tokens
        self.shelf = set()
        self.by_id = {}

    def fetch(self):
        if self.shelf:
            return self.by_id[self.shelf.pop()]  # clean: handed to the caller
        buf = torch.empty(self.max_tokens, self.width)
        self.by_id[id(buf)] = buf
        return buf

    def stow(self, buf):
        self.shelf.add(id(buf))


class DispatchRequest:
    def __init__(self, expert, count, buf):
        self.expert = expert
        self.count = count
        self.buf = buf


class Router(nn.Module):
    def __init__(self, dim, experts, depot, capacity, group=None):
        super().__init__()
        self.gate = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(experts))
        self.depot = depot
        self.capacity = capacity
        self.group = group
        self.outbox = []

    def route(self, x):
        choice = self.gate(x).argmax(dim=-1)
        dropped = 0
        for e in range(len(self.experts)):
            tokens = x[choice == e]
            n = len(tokens)
            if n == 0:
                continue
            if not self.capacity.try_draw(e, n):  # clean: near miss, the drawn capacity goes into the request that flush refunds
                dropped += n
                continue
            buf = self.depot.fetch()  # clean: moved into the request and stowed by flush
            buf[:n].copy_(tokens)
            self.outbox.append(DispatchRequest(e, n, buf))
        return choice, dropped

    def flush(self):
        results = {}
        while self.outbox:
            req = self.outbox.pop(0)
            results[req.expert] = self.experts[req.expert](req.buf[: req.count].clone())
            self.depot.stow(req.buf)
            self.capacity.refund(req.expert, req.count)
        return results

    def forward(self, x):
        choice, _ = self.route(x)
        out = torch.zeros_like(x)
        for e, y in self.flush().items():
            out[choice == e] = y
        return out

    def run_single(self, expert, tokens):
        n = len(tokens)
        if not self.capacity.try_draw(expert, n):  # leak: the drawn capacity is not refunded on the oversize return
            return None
        if n > self.depot.max_tokens:
            return None
        buf = self.depot.fetch()  # clean: stowed before the return
        buf[:n].copy_(tokens)
        y = self.experts[expert](buf[:n].clone())
        self.depot.stow(buf)
        self.capacity.refund(expert, n)
        return y

    def draw_pair(self, a, b, n):
        """Draw n on both experts or on neither."""
        if not self.capacity.try_draw(a, n):  # clean: near miss, refunded when the second draw fails, else the pair is the caller's
            return False
        if not self.capacity.try_draw(b, n):  # clean: the pair is the caller's
            self.capacity.refund(a, n)
            return False
        return True

    def duplicate(self, a, b, tokens):
        n = len(tokens)
        if not self.draw_pair(a, b, n):  # leak: only the first expert is refunded
            return None
        y = self.experts[a](tokens) + self.experts[b](tokens)
        self.capacity.refund(a, n)
        return y / 2

    def all_to_all(self, counts_in, counts_out, tokens):
        send = self.depot.fetch()  # clean: stowed after the exchange
        recv = self.depot.fetch()  # leak: only the clone leaves and the buffer is not stowed
        n = len(tokens)
        send[:n].copy_(tokens)
        dist.all_to_all_single(
            recv[: sum(counts_in)], send[:n], counts_in, counts_out, group=self.group
        )
        self.depot.stow(send)
        return recv[: sum(counts_in)].clone()


class AsyncDispatcher:
    """Serves dispatch requests from tasks."""

    def __init__(self, router):
        self.router = router
        self.gate = asyncio.Semaphore(4)
        self.tasks = {}

    async def _work(self, expert, buf, n):
        try:
            await asyncio.sleep(0)
            return self.router.experts[expert](buf[:n].clone())
        finally:
            self.router.depot.stow(buf)

    def submit(self, key, expert, tokens):
        buf = self.router.depot.fetch()  # clean: near miss, the task stows it in its finally
        buf[: len(tokens)].copy_(tokens)
        self.tasks[key] = asyncio.create_task(self._work(expert, buf, len(tokens)))

    async def collect(self, key):
        task = self.tasks.pop(key, None)
        if task is None:
            return None
        return await task

    async def limited(self, expert, tokens):
        await self.gate.acquire()  # leak: the empty batch returns without releasing the gate
        if len(tokens) == 0:
            return tokens
        y = self.router.experts[expert](tokens)
        self.gate.release()
        return y
