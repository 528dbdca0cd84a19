"""LongNet-style dilated attention, workspace taken from a shape-keyed pool."""
import torch
import torch.nn as nn
from einops import rearrange


class WorkspacePool:
    def __init__(self):
        self.store = {}
        self.live = 0

    def get_buffer(self, shape, dtype=torch.float32, device="cpu"):
        key = (tuple(shape), dtype, str(device))
        bucket = self.store.setdefault(key, [])
        self.live += 1
        if bucket:
            return bucket.pop()
        return torch.empty(shape, dtype=dtype, device=device)

    def return_buffer(self, buf):
        key = (tuple(buf.shape), buf.dtype, str(buf.device))
        self.live -= 1
        self.store.setdefault(key, []).append(buf)

    def clear(self):
        self.store = {}


class DilatedAttention(nn.Module):
    def __init__(self, dim, heads, segment_lengths, dilations, pool=None):
        super().__init__()
        self.heads = heads
        self.segment_lengths = segment_lengths
        self.dilations = dilations
        self.pool = pool
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def _attend(self, q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if self.pool is not None:
            out = self.pool.get_buffer((b, n, d), x.dtype, x.device)  # leak: the division by the number of scales rebinds out
            out.zero_()
        else:
            out = torch.zeros_like(x)
        num = 0
        for s, r in zip(self.segment_lengths, self.dilations):
            if s > n:
                continue
            idx = torch.arange(0, n, r, device=x.device)
            o = self._attend(q[:, idx], k[:, idx], v[:, idx])
            out[:, idx] += o
            num += 1
        out = out / max(num, 1)
        y = self.proj(out)
        if self.pool is not None:
            self.pool.return_buffer(out)
        return y

    def forward_inplace(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if self.pool is not None:
            out = self.pool.get_buffer((b, n, d), x.dtype, x.device)  # clean: near miss, div_ in place and the same None test at the return
            out.zero_()
        else:
            out = torch.zeros_like(x)
        for r in self.dilations:
            out[:, ::r] += self._attend(q[:, ::r], k[:, ::r], v[:, ::r])
        out.div_(len(self.dilations))
        y = self.proj(out)
        if self.pool is not None:
            self.pool.return_buffer(out)
        return y

    def _sparse_scores(self, q, k, r):
        qs, ks = q[:, ::r], k[:, ::r]
        buf = self.pool.get_buffer((q.shape[0], qs.shape[1], ks.shape[1]))  # clean: handed out
        torch.bmm(qs, ks.transpose(1, 2), out=buf)
        return buf

    def entropy(self, q, k):
        total = 0.0
        for r in self.dilations:
            scores = self._sparse_scores(q, k, r)  # leak: softmax result takes the name and goes back in place of the buffer
            scores = scores.softmax(-1)
            total -= float((scores * scores.clamp_min(1e-9).log()).sum())
            self.pool.return_buffer(scores)
        return total

    def max_score(self, q, k):
        best = float("-inf")
        for r in self.dilations:
            scores = self._sparse_scores(q, k, r)  # clean: near miss, flat is a view and the whole buffer is returned
            flat = scores.view(-1)
            best = max(best, float(flat.max()))
            self.pool.return_buffer(scores)
        return best

    def sparse_probs(self, q, k, r):
        scores = self._sparse_scores(q, k, r)  # clean: returned before the new tensor leaves
        probs = scores.softmax(-1)
        self.pool.return_buffer(scores)
        return probs

    def sparsity(self, q, k, r, thr=None):
        scores = self._sparse_scores(q, k, r)  # leak: with no threshold the method leaves at once
        if thr is None:
            return 0.0
        frac = (scores < thr).float().mean().item()
        self.pool.return_buffer(scores)
        return frac


class MultiScale(nn.Module):
    def __init__(self, layers, pool):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.pool = pool

    def forward(self, x, keep=False):
        acts = []
        for layer in self.layers:
            a = self.pool.get_buffer(x.shape, x.dtype)  # clean: near miss, every entry of acts is returned below
            a.copy_(layer(x))
            acts.append(a)
        y = torch.stack(acts).mean(0)
        for a in acts:
            self.pool.return_buffer(a)
        return y

    def forward_residual(self, x):
        res = self.pool.get_buffer(x.shape, x.dtype)  # clean: near miss, += on a tensor stays in place
        res.copy_(x)
        for layer in self.layers:
            res += layer(res)
        y = rearrange(res, "b n d -> b (n d)").clone()
        self.pool.return_buffer(res)
        return y

    def forward_last(self, x):
        for layer in self.layers:
            cur = self.pool.get_buffer(x.shape, x.dtype)  # leak: only the buffer of the last layer is returned
            cur.copy_(layer(x))
            x = cur
        y = self.proj_mean(x)
        self.pool.return_buffer(x)
        return y

    def proj_mean(self, x):
        return x.mean(dim=1)
