"""A small bag-of-tokens encoder. `encode` returns a loaned tensor, the caller repays."""
import torch

from . import buffers


class Encoder:
    def __init__(self, vocab, width, out_width):
        self.table = torch.randn(vocab, width)
        self.proj = torch.randn(width, out_width)

    def _pool_tokens(self, loans, batch):
        x = loans.get(len(batch), self.table.shape[1])  # clean: repaid by the caller's Loans
        if x is None:
            return None
        for i, toks in enumerate(batch):
            torch.mean(self.table[toks], dim=0, out=x[i])
        return x

    def encode(self, batch):
        with buffers.Loans() as loans:
            x = self._pool_tokens(loans, batch)  # clean: repaid by the Loans on the way out
            if x is None:
                return None
            out = loans.get(len(batch), self.proj.shape[1])  # clean: near miss, keep takes it out of the set for the caller
            if out is None:
                return None
            torch.matmul(x, self.proj, out=out)
            return loans.keep(out)

    def encode_normalised(self, batch, eps=1e-6):
        raw = self.encode(batch)  # leak: not repaid when there is no second tensor
        if raw is None:
            return None
        out = buffers.loan_like(raw)  # clean: handed to the caller
        if out is None:
            return None
        torch.div(raw, raw.norm(dim=1, keepdim=True).clamp_min(eps), out=out)
        buffers.repay(raw)
        return out

    def similarity(self, a, b):
        ea = self.encode(a)  # clean: repaid on all three ways out
        if ea is None:
            return None
        eb = self.encode(b)  # clean: repaid after the product
        if eb is None:
            buffers.repay(ea)
            return None
        sim = ea @ eb.T
        buffers.repay(eb)
        buffers.repay(ea)
        return sim
