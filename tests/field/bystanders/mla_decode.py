# MLA decode with split-KV: partial outputs and LSE live in a workspace stack.
import torch


class WorkspaceStack:
    def __init__(self, splits, heads, dim, depth=4):
        self.shape = (splits, heads, dim)
        self.free_list = [torch.empty(self.shape) for _ in range(depth)]

    def take(self):
        if not self.free_list:
            return torch.empty(self.shape)
        return self.free_list.pop()

    def return_(self, ws):
        self.free_list.append(ws)


def merge_partials(partial, lse):
    w = torch.softmax(lse, dim=0).unsqueeze(-1)
    return (partial * w).sum(0)


class MLADecode:
    def __init__(self, stack, scale, splits, debug=False):
        self.stack = stack
        self.scale = scale
        self.splits = splits
        self.debug = debug
        self.last = None

    def _partials(self, q, kv):
        """pooled (splits, heads, dim) tensor and the lse"""
        ws = self.stack.take()  # clean: goes to the caller along with the lse
        lse = []
        for i, part in enumerate(kv.chunk(self.splits)):
            s = q @ part.t() * self.scale
            lse.append(s.logsumexp(-1))
            ws[i].copy_(s.softmax(-1) @ part)
        return ws, torch.stack(lse)

    def decode(self, q, kv):
        ws, lse = self._partials(q, kv)  # clean: returned after the merge
        out = merge_partials(ws, lse)
        self.stack.return_(ws)
        return out

    def decode_short(self, q, kv):
        ws, lse = self._partials(q, kv)  # leak: the single split case returns a copy and skips return_
        if self.splits == 1:
            return ws[0].clone()
        out = merge_partials(ws, lse)
        self.stack.return_(ws)
        return out

    def decode_masked(self, q, kv, mask):
        ws, lse = self._partials(q, kv)  # leak: the product with the mask takes the name, the workspace is lost
        ws = ws * mask.view(-1, 1, 1)
        lse = lse.masked_fill(~mask.bool().view(-1, 1), float("-inf"))
        out = merge_partials(ws, lse)
        return out

    def decode_masked_(self, q, kv, mask):
        ws, lse = self._partials(q, kv)  # clean: near miss, mul_ keeps the storage and the view shares it
        ws.mul_(mask.view(-1, 1, 1))
        used = ws[: self.splits]
        out = merge_partials(used, lse)
        self.stack.return_(ws)
        return out

    def decode_debug(self, q, kv):
        ws, lse = self._partials(q, kv)  # leak: in debug mode last is overwritten on each call, nothing returns it
        out = merge_partials(ws, lse)
        if self.debug:
            self.last = ws
        else:
            self.stack.return_(ws)
        return out

    def decode_checked(self, q, kv):
        ws, lse = self._partials(q, kv)  # clean: near miss, returned before the raise
        out = merge_partials(ws, lse)
        bad = bool(torch.isnan(ws).any())
        self.stack.return_(ws)
        if bad:
            raise FloatingPointError("NaN in the partial outputs")
        return out

    def decode_batch(self, qs, kvs):
        outs = []
        for q, kv in zip(qs, kvs):
            if kv.shape[0] == 0:
                outs.append(torch.zeros_like(q))
                continue
            ws, lse = self._partials(q, kv)  # clean: near miss, the continue lies before
            outs.append(merge_partials(ws, lse))
            self.stack.return_(ws)
        return torch.stack(outs)

    def decode_until(self, qs, kv, stop):
        outs = []
        for q in qs:
            ws, lse = self._partials(q, kv)  # leak: the break leaves the last workspace out
            o = merge_partials(ws, lse)
            if stop(o):
                break
            outs.append(o)
            self.stack.return_(ws)
        return outs

    def lse_only(self, q, kv):
        return self._partials(q, kv)[1]  # leak: the workspace half of the tuple is dropped
