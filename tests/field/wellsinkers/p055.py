"""Matrices lent by shape, tracked by id until they are returned."""
import numpy as np


class MatrixLoans:
    def __init__(self, max_out=128):
        self._shelves = {}
        self._loans = {}
        self._max_out = max_out

    def loan(self, *shape):
        if len(self._loans) >= self._max_out:
            raise RuntimeError("too many matrices out")
        shelf = self._shelves.get(shape)
        m = shelf.pop() if shelf else np.empty(shape)
        self._loans[id(m)] = m
        return m

    def repay(self, *matrices):
        for m in matrices:
            if self._loans.pop(id(m), None) is None:
                raise KeyError("not on loan")
            self._shelves.setdefault(m.shape, []).append(m)

    def __len__(self):
        return len(self._loans)


class Filter:
    def __init__(self, loans, n):
        self.loans = loans
        self.n = n
        self.state = loans.loan(n, n)  # clean: held by the filter, repaid by close

    def close(self):
        self.loans.repay(self.state)

    def predict(self, f):
        tmp = self.loans.loan(self.n, self.n)  # clean: repaid with the other
        out = self.loans.loan(self.n, self.n)  # clean: repaid with the other
        np.matmul(f, self.state, out=tmp)
        np.matmul(tmp, f.T, out=out)
        self.state[:] = out
        self.loans.repay(tmp, out)

    def update(self, h, z):
        gain = self.loans.loan(self.n, self.n)  # leak: the quiet case does not repay
        np.matmul(self.state, h.T, out=gain)
        if not np.any(z):
            return 0.0
        self.state -= gain
        self.loans.repay(gain)
        return float(np.trace(self.state))


def residual(loans, a, x, b):
    r = loans.loan(*b.shape)  # leak: the view is returned as a number, r never repaid
    np.matmul(a, x, out=r)
    r -= b
    return float(np.abs(r).max())


def gram(loans, a):
    g = loans.loan(a.shape[1], a.shape[1])  # clean: handed to the caller
    np.matmul(a.T, a, out=g)
    return g
