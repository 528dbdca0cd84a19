'''Activation observers for post-training quantization.

Each layer gets a histogram row out of a shared bank while calibration is on.
'''
import logging
from typing import Dict, Optional, Tuple

import torch
from torch import nn

logger = logging.getLogger('quant.calib')


class HistogramBank:
    def __init__(self, rows, bins=2048):
        self.data = torch.zeros(rows, bins)
        self.bins = bins
        self._bitmap = 0
        self.rows = rows

    def claim_row(self):
        for i in range(self.rows):
            if not self._bitmap >> i & 1:
                self._bitmap |= 1 << i  # clean: the number of the row is returned
                self.data[i].zero_()
                return i
        raise RuntimeError('histogram bank is full')

    def unclaim_row(self, i):
        self._bitmap &= ~(1 << i)

    def grow(self, extra):
        self.data = torch.cat([self.data, torch.zeros(extra, self.bins)])
        self.rows += extra


class RowMixin:
    '''Row handling shared by all observers.'''

    bank: HistogramBank
    row: Optional[int]

    def ensure_row(self):
        if self.row is None:
            self.row = self.bank.claim_row()  # clean: near miss, only when there is none, drop_row gives it up
        return self.row

    def drop_row(self):
        if self.row is not None:
            self.bank.unclaim_row(self.row)
            self.row = None


class MinMaxObserver(RowMixin, nn.Module):
    def __init__(self, bank):
        super().__init__()
        self.bank = bank
        self.row = None
        self.lo = float('inf')
        self.hi = float('-inf')

    def forward(self, x):
        row = self.ensure_row()
        self.lo = min(self.lo, float(x.min()))
        self.hi = max(self.hi, float(x.max()))
        self.bank.data[row] += torch.histc(x.float(), bins=self.bank.bins, min=self.lo, max=self.hi)
        return x

    def rebase(self, lo, hi):
        '''Start again with a known range.'''
        self.lo, self.hi = lo, hi
        self.row = self.bank.claim_row()  # leak: the row in use so far is overwritten

    def rescale(self, lo, hi):
        fresh = self.bank.claim_row()  # clean: near miss, drop_row gives up the old row before the new one is stored
        if self.row is not None:
            self.bank.data[fresh].copy_(self.bank.data[self.row])
        self.drop_row()
        self.lo, self.hi = lo, hi
        self.row = fresh

    def finish(self):
        scale = (self.hi - self.lo) / 255.0
        self.drop_row()
        return scale


class PerTokenObserver(RowMixin, nn.Module):
    def __init__(self, bank, tokens):
        super().__init__()
        self.bank = bank
        self.row = None
        self.token_rows = [bank.claim_row() for _ in range(tokens)]  # leak: finish gives up only the first of them

    def forward(self, x):
        for t, r in enumerate(self.token_rows[:x.shape[0]]):
            self.bank.data[r, 0] = max(float(self.bank.data[r, 0]), float(x[t].abs().max()))
        return x

    def finish(self):
        peak = max(float(self.bank.data[r, 0]) for r in self.token_rows)
        self.bank.unclaim_row(self.token_rows[0])
        self.token_rows = []
        return peak / 127.0


class PerHeadObserver(RowMixin, nn.Module):
    def __init__(self, bank, heads):
        super().__init__()
        self.bank = bank
        self.row = None
        self.head_rows = {h: bank.claim_row() for h in range(heads)}  # clean: finish pops and gives up all of them

    def forward(self, x):
        for h, r in self.head_rows.items():
            self.bank.data[r, 0] = torch.maximum(self.bank.data[r, 0], x[:, h].abs().max())
        return x

    def finish(self):
        scales = {}
        while self.head_rows:
            h, r = self.head_rows.popitem()
            scales[h] = float(self.bank.data[r, 0]) / 127.0
            self.bank.unclaim_row(r)
        return scales


def kl_threshold(bank: HistogramBank, hist: torch.Tensor) -> Optional[int]:
    """Bin index at which clipping loses least; None for an empty histogram."""
    p = bank.claim_row()  # leak: an empty histogram returns None with the row claimed
    q = bank.claim_row()  # leak: an empty histogram returns None with the row claimed
    if float(hist.sum()) == 0.0:
        return None
    best, where = float('inf'), bank.bins
    for stop in range(128, bank.bins + 1, 16):
        bank.data[p].zero_()
        bank.data[p, :stop] = hist[:stop]
        bank.data[p, stop - 1] += hist[stop:].sum()
        bank.data[q].copy_(bank.data[p]).clamp_(min=1e-8)
        d = float((bank.data[p] * ((bank.data[p] + 1e-8) / bank.data[q]).log()).sum())
        if d < best:
            best, where = d, stop
    bank.unclaim_row(q)
    bank.unclaim_row(p)
    return where


def percentile(bank: HistogramBank, hist: torch.Tensor, frac: float) -> int:
    if not 0.0 < frac <= 1.0:
        raise ValueError(frac)
    r = bank.claim_row()  # clean: near miss, the loop's early return comes after the row is given up
    torch.cumsum(hist, 0, out=bank.data[r])
    cum = bank.data[r] / bank.data[r, -1]
    bank.unclaim_row(r)
    for i, v in enumerate(cum.tolist()):
        if v >= frac:
            return i
    return bank.bins - 1


def sweep(bank: HistogramBank, layers: Dict[str, torch.Tensor]) -> Dict[str, Tuple[float, float]]:
    res = {}
    for name, act in layers.items():
        r = bank.claim_row()  # leak: constant layers are skipped with their row claimed
        lo, hi = float(act.min()), float(act.max())
        if lo == hi:
            logger.info('%s is constant', name)
            continue
        bank.data[r].copy_(torch.histc(act, bins=bank.bins, min=lo, max=hi))
        res[name] = (lo, hi)
        bank.unclaim_row(r)
    return res


def dump(bank: HistogramBank, layer: str, act: torch.Tensor, path: str) -> None:
    r = bank.claim_row()  # clean: given up in finally
    try:
        bank.data[r].copy_(torch.histc(act, bins=bank.bins))
        with open(path, 'a') as f:  # clean: with statement
            f.write(layer + ' ' + ' '.join(f'{v:.0f}' for v in bank.data[r].tolist()) + '\n')
    finally:
        bank.unclaim_row(r)
