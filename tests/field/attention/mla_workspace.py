import math
import torch
from torch import nn, Tensor


class LatentWorkspace:
    """Keeps a dict name -> tensor; lend()/unlend() by name and shape."""

    def __init__(self, device="cpu"):
        self.device = device
        self.stock = {}
        self.lent = set()

    def lend(self, rows, cols):
        bucket = self.stock.setdefault(cols, [])
        for i, t in enumerate(bucket):
            if t.size(0) >= rows:
                del bucket[i]
                self.lent.add(id(t))
                return t
        t = torch.empty(rows, cols, device=self.device)
        self.lent.add(id(t))
        return t

    def unlend(self, t):
        self.lent.remove(id(t))
        self.stock.setdefault(t.size(1), []).append(t)


class MLADecode(nn.Module):
    def __init__(self, dim, latent, heads, ws=None):
        super().__init__()
        self.q_proj = nn.Linear(dim, latent * heads)
        self.kv_down = nn.Linear(dim, latent)
        self.out = nn.Linear(latent * heads, dim)
        self.heads, self.latent = heads, latent
        self.ws = ws
        self._keep = None
        self._cols = None

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        if self.ws is None:
            buf = x.new_empty(x.size(0), self.latent)
        else:
            buf = self.ws.lend(x.size(0), self.latent)  # clean: near miss, unlent under the same test of the field
        lat = buf[: x.size(0)]
        lat.copy_(self.kv_down(x))
        full = torch.cat([cache, lat])
        q = self.q_proj(x).view(x.size(0), self.heads, self.latent)
        p = torch.einsum("bhl,tl->bht", q, full).mul_(1 / math.sqrt(self.latent)).softmax(-1)
        y = torch.einsum("bht,tl->bhl", p, full)
        if self.ws is not None:
            self.ws.unlend(buf)
        return self.out(y.flatten(1))

    def forward_train(self, x: Tensor) -> Tensor:
        use_ws = self.ws is not None and not self.training
        buf = self.ws.lend(x.size(0), self.latent) if use_ws else None  # clean: near miss, use_ws does not change in between
        lat = self.kv_down(x)
        if use_ws:
            buf[: x.size(0)].copy_(lat)
            lat = buf[: x.size(0)].clone()
        y = self.q_proj(x).view(x.size(0), self.heads, -1) * lat.unsqueeze(1)
        if use_ws:
            self.ws.unlend(buf)
        return self.out(y.flatten(1))

    def forward_eval(self, x: Tensor, absorb: bool) -> Tensor:
        buf = self.ws.lend(x.size(0), self.latent)  # leak: returned only if absorb and in evaluation
        lat = buf[: x.size(0)]
        lat.copy_(self.kv_down(x))
        y = self.out((self.q_proj(x).view(x.size(0), self.heads, -1) * lat.unsqueeze(1)).flatten(1))
        if absorb and not self.training:
            self.ws.unlend(buf)
        return y

    def begin_forward(self, rows: int) -> None:
        if self._keep is not None:
            self.end_forward()
        self._keep = self.ws.lend(rows, self.latent)  # clean: near miss, a previous one is ended first

    def end_forward(self) -> None:
        if self._keep is None:
            return
        self.ws.unlend(self._keep)
        self._keep = None

    def plan_columns(self, rows: int) -> None:
        self._cols = self.ws.lend(rows, 2 * self.latent)  # leak: the buffer of the previous plan is overwritten

    def drop_columns(self) -> None:
        if self._cols is not None:
            self.ws.unlend(self._cols)
            self._cols = None

    def two_stage(self, x: Tensor) -> Tensor:
        a = self.ws.lend(x.size(0), self.latent)  # leak: after the swap this one is called b, and b is never unlent
        b = self.ws.lend(x.size(0), self.latent)  # clean: after the swap the name a stands for this one, and it is unlent
        a[: x.size(0)].copy_(self.kv_down(x))
        torch.tanh(a, out=b)
        a, b = b, a
        y = a[: x.size(0)].clone()
        self.ws.unlend(a)
        return y

    def two_stage_swapped(self, x: Tensor) -> Tensor:
        a = self.ws.lend(x.size(0), self.latent)  # clean: near miss, both names are unlent after the swap
        b = self.ws.lend(x.size(0), self.latent)  # clean: near miss, both names are unlent after the swap
        a[: x.size(0)].copy_(self.kv_down(x))
        for _ in range(2):
            torch.tanh(a, out=b)
            a, b = b, a
        y = a[: x.size(0)].clone()
        self.ws.unlend(a)
        self.ws.unlend(b)
        return y

    def latent_of(self, x: Tensor):
        t = self.ws.lend(x.size(0), self.latent)  # clean: handed to the caller
        t[: x.size(0)].copy_(self.kv_down(x))
        return t

    def cosine(self, x: Tensor, y: Tensor) -> Tensor:
        u, v = self.latent_of(x), self.latent_of(y)  # clean: both unlent
        c = torch.cosine_similarity(u[: x.size(0)], v[: y.size(0)], dim=-1)
        self.ws.unlend(v)
        self.ws.unlend(u)
        return c

    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        u = self.latent_of(x)  # clean: unlent
        d = (u[: x.size(0)] - self.latent_of(y)[: y.size(0)]).norm(dim=-1)  # leak: the second latent buffer lives in the expression only
        self.ws.unlend(u)
        return d

    def store(self, x: Tensor, cache: dict, key: str) -> None:
        cache[key] = self.latent_of(x).clone()  # leak: the cache gets the clone, the buffer is dropped
