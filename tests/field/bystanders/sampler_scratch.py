import logging

import torch

logger = logging.getLogger(__name__)

NEG_INF = float("-inf")


class ScratchPool:
    """vocab sized rows, handed out by batch size"""

    def __init__(self, vocab, max_batch, device="cpu"):
        self.vocab = vocab
        self.device = device
        self.cache = {}
        self.max_batch = max_batch

    def alloc_rows(self, batch):
        if batch > self.max_batch:
            return None
        spare = self.cache.setdefault(batch, [])
        if spare:
            return spare.pop()
        return torch.empty(batch, self.vocab, device=self.device)

    def free_rows(self, rows):
        self.cache[rows.shape[0]].append(rows)


class Sampler:
    def __init__(self, pool, use_scratch=True):
        self.pool = pool
        self.use_scratch = use_scratch

    def _copy(self, logits):
        rows = self.pool.alloc_rows(logits.shape[0])  # clean: near miss, None leads to a plain clone, rows go to the caller
        if rows is None:
            return logits.clone(), False
        rows.copy_(logits)
        return rows, True

    def sample(self, logits, temperature=1.0):
        rows, pooled = self._copy(logits)  # clean: near miss, freed when the flag says so
        rows.div_(max(temperature, 1e-5))
        out = torch.multinomial(rows.softmax(-1), 1).squeeze(-1)
        if pooled:
            self.pool.free_rows(rows)
        return out

    def sample_top_k(self, logits, k):
        rows, pooled = self._copy(logits)  # leak: k of zero or less returns greedily before the free
        if k <= 0:
            return logits.argmax(-1)
        kth = rows.topk(k, dim=-1).values[:, -1:]
        rows.masked_fill_(rows < kth, NEG_INF)
        out = torch.multinomial(rows.softmax(-1), 1).squeeze(-1)
        if pooled:
            self.pool.free_rows(rows)
        return out

    def sample_top_p(self, logits, p):
        if p >= 1.0:
            return self.sample(logits)
        rows, pooled = self._copy(logits)  # clean: near miss, the early return is ahead of the copy
        sorted_, idx = rows.sort(descending=True, dim=-1)
        drop = sorted_.softmax(-1).cumsum(-1) > p
        drop[:, 0] = False
        rows.scatter_(1, idx, sorted_.masked_fill(drop, NEG_INF))
        out = torch.multinomial(rows.softmax(-1), 1).squeeze(-1)
        if pooled:
            self.pool.free_rows(rows)
        return out

    def penalize(self, logits, history, penalty):
        """returns penalized logits as an ordinary tensor"""
        rows = self.pool.alloc_rows(logits.shape[0])  # leak: where takes rows over as input only, the result is a new tensor under the name
        if rows is None:
            rows = torch.empty_like(logits)
        rows.copy_(logits)
        seen = torch.zeros_like(rows, dtype=torch.bool)
        for i, h in enumerate(history):
            seen[i, h] = True
        rows = torch.where(seen, rows / penalty, rows)
        return rows

    def logprobs(self, logits, tokens):
        if self.use_scratch:
            rows = self.pool.alloc_rows(logits.shape[0])  # clean: near miss, freed under the same flag, None is an error
            if rows is None:
                raise ValueError("batch too large")
        else:
            rows = torch.empty_like(logits)
        torch.sub(logits, logits.logsumexp(-1, keepdim=True), out=rows)
        picked = rows.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        if self.use_scratch:
            self.pool.free_rows(rows)
        return picked

    def entropy(self, logits):
        rows = None
        if self.use_scratch:
            rows = self.pool.alloc_rows(logits.shape[0])  # leak: freed only in debug logging
        p = torch.softmax(logits, -1)
        if rows is not None:
            torch.mul(p, p.clamp_min(1e-9).log(), out=rows)
            h = -rows.sum(-1)
        else:
            h = -(p * p.clamp_min(1e-9).log()).sum(-1)
        if rows is not None and logger.isEnabledFor(logging.DEBUG):
            logger.debug("entropy %s", h)
            self.pool.free_rows(rows)
        return h

    def min_p(self, logits, threshold):
        rows = self.pool.alloc_rows(logits.shape[0])  # clean: near miss, the loop's break leads to the free
        if rows is None:
            return logits
        rows.copy_(logits.softmax(-1))
        out = []
        for r in rows:
            keep = r >= threshold * r.max()
            if not keep.any():
                break
            out.append(int(torch.multinomial(r * keep, 1)))
        self.pool.free_rows(rows)
        return out

    def warm(self, batches):
        for b in batches:
            self.pool.alloc_rows(b)  # leak: rows allocated for warming are discarded
