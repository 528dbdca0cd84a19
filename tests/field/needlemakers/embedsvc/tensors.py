import threading

import torch


class TensorPool:
    def __init__(self, device="cuda", keep=16):
        self.device = device
        self.keep = keep
        self._by_key = {}
        self._mu = threading.Lock()
        self.out = 0

    def check_out(self, rows, dim, dtype=torch.float32):
        with self._mu:
            self.out += 1
            cell = self._by_key.get((rows, dim, dtype))
            if cell:
                return cell.pop()  # clean: returned to the caller
        return torch.empty(rows, dim, dtype=dtype, device=self.device)

    def check_in(self, t):
        with self._mu:
            self.out -= 1
            cell = self._by_key.setdefault((*t.shape, t.dtype), [])
            if len(cell) < self.keep:
                cell.append(t)


class PaddedPool:
    """Rounds rows up, so that fewer shapes are cached."""

    def __init__(self, inner, multiple=32):
        self.inner = inner
        self.multiple = multiple

    def check_out(self, rows, dim, dtype=torch.float32):
        padded = -(-rows // self.multiple) * self.multiple
        return self.inner.check_out(padded, dim, dtype)  # clean: returned to the caller

    def check_in(self, t):
        self.inner.check_in(t)

    def filled(self, src):
        t = self.check_out(src.shape[0], src.shape[1], src.dtype)  # clean: returned to the caller
        t[: src.shape[0]].copy_(src)
        t[src.shape[0]:].zero_()
        return t
