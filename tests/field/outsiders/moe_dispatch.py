"""Expert-parallel token dispatch with pooled all-to-all buffers."""
from dataclasses import dataclass
from typing import Callable, List, Optional, Tuple
import torch
from torch import Tensor, nn


class DispatchPool:
    def __init__(self, capacity: int, hidden: int, count: int = 8):
        self._bufs = [torch.empty(capacity, hidden) for _ in range(count)]

    def grab(self) -> Optional[Tensor]:
        return self._bufs.pop() if self._bufs else None

    def put_back(self, t: Tensor) -> None:
        self._bufs.append(t)


@dataclass
class Dispatch:
    send: Tensor
    recv: Tensor
    counts: List[int]


class ExpertLayer(nn.Module):
    def __init__(self, hidden: int, n_experts: int, top_k: int, pool: DispatchPool,
                 all_to_all: Callable[[Tensor, Tensor], None], drop_tokens: bool = True):
        super().__init__()
        self.router = nn.Linear(hidden, n_experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(n_experts))
        self.top_k = top_k
        self.pool = pool
        self.all_to_all = all_to_all
        self.drop_tokens = drop_tokens

    def route(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        w, ids = torch.topk(self.router(x).softmax(-1), self.top_k)
        return w / w.sum(-1, keepdim=True), ids

    def dispatch(self, x: Tensor, ids: Tensor) -> Optional[Dispatch]:
        send = self.pool.grab()  # leak: without a receive buffer None is returned and this one is lost
        if send is None:
            return None
        recv = self.pool.grab()  # clean: returned in the Dispatch
        if recv is None:
            return None
        order = ids[:, 0].argsort()
        send[: x.shape[0]].copy_(x[order])
        self.all_to_all(recv, send)
        counts = torch.bincount(ids[:, 0], minlength=len(self.experts)).tolist()
        return Dispatch(send, recv, counts)

    def dispatch_pair(self, x: Tensor, ids: Tensor) -> Optional[Dispatch]:
        send = self.pool.grab()  # clean: near miss, put back when its partner is missing
        if send is None:
            return None
        recv = self.pool.grab()  # clean: returned in the Dispatch
        if recv is None:
            self.pool.put_back(send)
            return None
        send[: x.shape[0]].copy_(x[ids[:, 0].argsort()])
        self.all_to_all(recv, send)
        return Dispatch(send, recv, torch.bincount(ids[:, 0]).tolist())

    def release(self, d: Dispatch) -> None:
        self.pool.put_back(d.send)
        self.pool.put_back(d.recv)

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        d = self.dispatch_pair(x, ids)  # clean: released after combine
        if d is None:
            return self.local_forward(x, w, ids)
        y = self.run_experts(d)
        self.release(d)
        return y * w[:, :1]

    def forward_train(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        d = self.dispatch(x, ids)  # leak: only the send half is put back
        if d is None:
            return self.local_forward(x, w, ids)
        y = self.run_experts(d)
        self.pool.put_back(d.send)
        return y * w[:, :1]

    def forward_capacity(self, x: Tensor, capacity: int) -> Tensor:
        w, ids = self.route(x)
        d = self.dispatch_pair(x, ids)  # leak: overflowing tokens in drop mode return x with the dispatch unreleased
        if d is None:
            return self.local_forward(x, w, ids)
        if self.drop_tokens and max(d.counts) > capacity:
            return x
        y = self.run_experts(d)
        self.release(d)
        return y * w[:, :1]

    def run_experts(self, d: Dispatch) -> Tensor:
        outs, off = [], 0
        for expert, n in zip(self.experts, d.counts):
            if n == 0:
                continue
            outs.append(expert(d.recv[off:off + n]))
            off += n
        return torch.cat(outs)

    def local_forward(self, x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
        acc = self.pool.grab()  # clean: near miss, None is replaced by a private tensor and only a pooled one is put back
        pooled = acc is not None
        if acc is None:
            acc = torch.empty_like(x)
        view = acc[: x.shape[0]]
        view.zero_()
        for k in range(self.top_k):
            for e, expert in enumerate(self.experts):
                sel = ids[:, k] == e
                if sel.any():
                    view[sel] += w[sel, k, None] * expert(x[sel])
        out = view.clone()
        if pooled:
            self.pool.put_back(acc)
        return out

    def load_stats(self, x: Tensor) -> Tensor:
        _, ids = self.route(x)
        tmp = self.pool.grab()  # leak: normalising rebinds the name and the new tensor is what gets put back
        if tmp is None:
            return torch.zeros(len(self.experts))
        tmp = tmp.zero_()
        tmp[: ids.shape[0], : self.top_k] = ids.float()
        tmp = tmp / max(1, ids.shape[0])
        out = tmp.sum(0)
        self.pool.put_back(tmp)
        return out

    def z_loss(self, x: Tensor) -> Tensor:
        tmp = self.pool.grab()  # clean: zero_ and a slice keep it, it is put back
        if tmp is None:
            return torch.logsumexp(self.router(x), -1).pow(2).mean()
        logits = tmp.zero_()[: x.shape[0], : len(self.experts)]
        logits.copy_(self.router(x))
        loss = torch.logsumexp(logits, -1).pow(2).mean()
        self.pool.put_back(tmp)
        return loss
