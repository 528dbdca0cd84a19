"""Gradient reduction with flat buffers of one pool: hooked buckets, a coalesced step and a sparse step."""
from collections import deque
from functools import partial

import torch
import torch.distributed as dist


class FlatPool:
    def __init__(self, device):
        self.device = device
        self._flats = {}

    def lend(self, numel, dtype):
        shelf = self._flats.setdefault((numel, dtype), [])
        return shelf.pop() if shelf else torch.empty(numel, dtype=dtype, device=self.device)

    def take_back(self, flat):
        self._flats.setdefault((flat.numel(), flat.dtype), []).append(flat)


def topk_payload(pool, flat, k):
    """The k largest entries: values and indices, two flats of the pool, both the caller's."""
    values = pool.lend(k, torch.float32)  # clean: handed to the caller
    indices = pool.lend(k, torch.int64)  # clean: handed to the caller
    scratch = pool.lend(flat.numel(), torch.float32)  # clean: taken back below
    torch.abs(flat, out=scratch)
    indices.copy_(torch.topk(scratch, k).indices)
    torch.index_select(flat, 0, indices, out=values)
    pool.take_back(scratch)
    return values, indices


class Reducer:
    def __init__(self, params, pool, group, cap, wire=torch.bfloat16):
        self.pool = pool
        self.group = group
        self.cap = cap
        self.wire = wire
        self.world = dist.get_world_size(group)
        self._flat, self._fill, self._members = None, 0, []
        self._pending = deque()
        self._hooks = []
        for i, param in enumerate(params):
            self._hooks.append(param.register_post_accumulate_grad_hook(partial(self._on_grad, i)))

    def _on_grad(self, index, param):
        grad = param.grad
        if grad.numel() > self.cap:
            dist.all_reduce(grad, group=self.group)
            grad.div_(self.world)
            return
        if self._flat is not None and self._fill + grad.numel() > self.cap:
            self._launch()
        if self._flat is None:
            self._flat = self.pool.lend(self.cap, self.wire)  # clean: near miss, queued, taken back by finish
        self._flat[self._fill:self._fill + grad.numel()].copy_(grad.reshape(-1))
        self._members.append((param, self._fill, grad.numel()))
        self._fill += grad.numel()

    def _launch(self):
        work = dist.all_reduce(self._flat[:self._fill], group=self.group, async_op=True)
        self._pending.append((work, self._flat, self._members))
        self._flat, self._fill, self._members = None, 0, []

    def finish(self):
        if self._flat is not None:
            self._launch()
        while self._pending:
            work, flat, members = self._pending.popleft()
            work.wait()
            for param, at, numel in members:
                param.grad.copy_(flat[at:at + numel].view_as(param.grad)).div_(self.world)
            self.pool.take_back(flat)

    def reduce_coalesced(self, named, clip=None, keep_flat=False):
        """Reduce all gradients in two alternating wire buffers; returns (norm, flat copies or None)."""
        order = sorted(named.items(), key=lambda item: item[1].numel(), reverse=True)
        plans, current, fill = [], [], 0
        for name, grad in order:
            if current and fill + grad.numel() > self.cap:
                plans.append(current)
                current, fill = [], 0
            current.append((name, grad, fill))
            fill += grad.numel()
        if current:
            plans.append(current)
        if not plans:
            return 0.0, None
        squares = self.pool.lend(len(plans), torch.float32)  # leak: a norm that is not finite returns early
        squares.zero_()
        front = self.pool.lend(self.cap, self.wire)  # clean: near miss, swapped, both names taken back on each way
        back = self.pool.lend(self.cap, self.wire)  # clean: near miss, swapped, both names taken back on each way
        copies = [] if keep_flat else None
        behind = None
        for number, plan in enumerate(plans + [None]):
            work = None
            if plan is not None:
                end = 0
                for _, grad, at in plan:
                    end = at + grad.numel()
                    front[at:end].copy_(grad.reshape(-1))
                work = dist.all_reduce(front[:end], group=self.group, async_op=True)
            if behind is not None:
                prev_work, prev_plan, prev_end = behind
                prev_work.wait()
                wide = self.pool.lend(self.cap, torch.float32)  # leak: when copies are kept only a clone is, see below
                wide[:prev_end].copy_(back[:prev_end])
                wide[:prev_end].div_(self.world)
                squares[number - 1] = wide[:prev_end].square().sum()
                for _, grad, at in prev_plan:
                    grad.copy_(wide[at:at + grad.numel()].view_as(grad))
                if copies is None:
                    self.pool.take_back(wide)
                else:
                    copies.append(wide[:prev_end].clone())
            if plan is None:
                break
            behind = (work, plan, end)
            front, back = back, front
        norm = float(squares.sum().sqrt())
        self.pool.take_back(front)
        self.pool.take_back(back)
        if norm != norm or norm == float("inf"):
            for _, grad in order:
                grad.zero_()
            return norm, None
        if clip is not None and norm > clip:
            factor = clip / (norm + 1e-6)
            for _, grad in order:
                grad.mul_(factor)
            if copies is not None:
                copies = [c.mul_(factor) for c in copies]
        self.pool.take_back(squares)
        return norm, copies

    def reduce_sparse(self, named, ratio, residuals, warmup=False):
        """All-gather the largest entries of each gradient; what is not sent stays in its residual."""
        sent = 0
        for name, grad in named.items():
            flat = grad.reshape(-1)
            if warmup or flat.numel() < 1024:
                dense = self.pool.lend(flat.numel(), torch.float32)  # clean: taken back before continue
                dense.copy_(flat)
                dist.all_reduce(dense, group=self.group)
                flat.copy_(dense.div_(self.world))
                self.pool.take_back(dense)
                sent += flat.numel()
                continue
            k = max(1, int(flat.numel() * ratio))
            residual = residuals.get(name)
            if residual is None:
                residual = self.pool.lend(flat.numel(), torch.float32)  # clean: near miss, in residuals for drop_residuals
                residual.zero_()
                residuals[name] = residual
            residual.add_(flat)
            values, indices = topk_payload(self.pool, residual, k)  # leak: only the values of the pair are taken back
            all_values = self.pool.lend(k * self.world, torch.float32)  # clean: near miss, taken back in the pair loop
            all_indices = self.pool.lend(k * self.world, torch.int64)  # clean: near miss, taken back in the pair loop
            dist.all_gather_into_tensor(all_values, values, group=self.group)
            dist.all_gather_into_tensor(all_indices, indices, group=self.group)
            residual.index_fill_(0, indices, 0.0)
            flat.zero_()
            flat.index_add_(0, all_indices, all_values.to(flat.dtype), alpha=1.0 / self.world)
            self.pool.take_back(values)
            for gathered in (all_values, all_indices):
                self.pool.take_back(gathered)
            sent += k
        return sent

    def drop_residuals(self, residuals):
        while residuals:
            _, residual = residuals.popitem()
            self.pool.take_back(residual)

    def sharded_norms(self, groups):
        """Norm of each parameter group over all ranks, computed from one wide scratch."""
        biggest = max((sum(p.grad.numel() for p in g) for g in groups), default=0)
        scratch = self.pool.lend(biggest, torch.float32) if biggest else None  # clean: near miss, same guard below
        norms = torch.zeros(len(groups), device=self.pool.device)
        for i, group in enumerate(groups):
            at = 0
            for p in group:
                scratch[at:at + p.grad.numel()].copy_(p.grad.reshape(-1))
                at += p.grad.numel()
            if at:
                norms[i] = scratch[:at].square().sum()
        dist.all_reduce(norms, group=self.group)
        if scratch is not None:
            self.pool.take_back(scratch)
        return norms.sqrt_()
