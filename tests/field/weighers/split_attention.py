"""Split-K attention as an autograd function; scratch comes from one workspace for each device."""
import torch


class Workspace:
    def __init__(self):
        self._shelf = {}
        self.out = 0

    def grab(self, *shape, like):
        stack = self._shelf.setdefault((shape, like.device), [])
        self.out += 1
        return stack.pop() if stack else torch.empty(shape, dtype=torch.float32, device=like.device)

    def drop(self, scratch):
        self.out -= 1
        self._shelf.setdefault((tuple(scratch.shape), scratch.device), []).append(scratch)


WS = Workspace()


def partial_scores(q, k, scale, bias=None):
    """Scores of one split in scratch that the caller drops."""
    s = WS.grab(*q.shape[:-1], k.shape[-2], like=q)  # clean: handed to the caller
    torch.matmul(q.float(), k.float().transpose(-1, -2), out=s)
    s.mul_(scale)
    if bias is not None:
        s.add_(bias)
    return s


class SplitAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale, splits, drop_p):
        b, h, n, d = q.shape
        if k.shape[2] < splits:
            splits = 1
        if scale is None:
            scale = d ** -0.5
        lse = WS.grab(b, h, n, like=q)  # clean: near miss, kept on ctx for backward, or dropped here
        part = WS.grab(splits, b, h, n, d, like=q)  # clean: dropped after the reduction
        rows = WS.grab(splits, b, h, n, like=q)  # clean: near miss, weights are computed in place and dropped
        for i, (ks, vs) in enumerate(zip(k.chunk(splits, 2), v.chunk(splits, 2))):
            s = partial_scores(q, ks, scale)  # clean: dropped each turn
            torch.logsumexp(s, -1, out=rows[i])
            s.sub_(rows[i].unsqueeze(-1)).exp_()
            torch.matmul(s, vs.float(), out=part[i])
            WS.drop(s)
        torch.logsumexp(rows, 0, out=lse)
        weights = rows.sub_(lse).exp_()
        out = (part * weights.unsqueeze(-1)).sum(0)
        WS.drop(weights)
        WS.drop(part)
        keep = None
        if drop_p > 0.0:
            keep = WS.grab(b, h, n, d, like=q)  # leak: ctx.keep is read by backward and never dropped
            keep.bernoulli_(1.0 - drop_p).div_(1.0 - drop_p)
            out = out * keep
        out = out.to(q.dtype)
        if any(ctx.needs_input_grad[:3]):
            ctx.save_for_backward(q, k, v, out)
            ctx.lse, ctx.keep = lse, keep
            ctx.scale, ctx.splits = scale, splits
        else:
            WS.drop(lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out = ctx.saved_tensors
        lse, ctx.lse = ctx.lse, None
        grad = grad.float()
        delta = WS.grab(*lse.shape, like=q)  # leak: frozen keys return early without dropping it
        torch.sum(grad * out.float(), -1, out=delta)
        if ctx.keep is not None:
            grad = grad * ctx.keep
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        ks, vs = k.chunk(ctx.splits, 2), v.chunk(ctx.splits, 2)
        if not (ctx.needs_input_grad[1] or ctx.needs_input_grad[2]):
            for kc, vc in zip(ks, vs):
                p = partial_scores(q, kc, ctx.scale)  # clean: near miss, ds is p, updated in place
                ds = p.sub_(lse.unsqueeze(-1)).exp_().mul_(grad @ vc.float().mT - delta.unsqueeze(-1))
                dq.add_(ds @ kc.float(), alpha=ctx.scale)
                WS.drop(ds)
            WS.drop(lse)
            return dq.to(q.dtype), None, None, None, None, None
        dks, dvs = [], []
        for kc, vc in zip(ks, vs):
            p = partial_scores(q, kc, ctx.scale).sub_(lse.unsqueeze(-1)).exp_()  # leak: ds is a new tensor, p stays out
            dvs.append(p.mT @ grad)
            ds = p * (grad @ vc.float().mT - delta.unsqueeze(-1))
            dq.add_(ds @ kc.float(), alpha=ctx.scale)
            dks.append((ds.mT @ q.float()) * ctx.scale)
        dk, dv = torch.cat(dks, 2).to(k.dtype), torch.cat(dvs, 2).to(v.dtype)
        WS.drop(delta)
        WS.drop(lse)
        return dq.to(q.dtype), dk, dv, None, None, None


def decode_attention(q, cache_k, cache_v, lengths, scale, bias=None, out=None, return_probs=False):
    """One query a sequence against its cache, without autograd; probabilities only on request."""
    probs_out = [] if return_probs else None
    rows = []
    tmp = WS.grab(*q.shape, like=q) if out is None else None  # clean: near miss, dropped under the same guard
    dest = tmp if out is None else out
    for i, length in enumerate(lengths):
        if length == 0:
            dest[i].zero_()
            continue
        k, v = cache_k[i, :, :length], cache_v[i, :, :length]
        s = partial_scores(q[i].unsqueeze(-2), k, scale, None if bias is None else bias[i])  # clean: dropped below
        top = s.amax(-1, keepdim=True)
        s.sub_(top).exp_()
        norm = s.sum(-1, keepdim=True)
        dest[i].copy_((s @ v.float()).div_(norm).squeeze(-2))
        if probs_out is not None:
            probs_out.append((s / norm).squeeze(-2))
        rows.append(top.add_(norm.log()))
        WS.drop(s)
    result = dest.to(q.dtype, copy=True)
    if tmp is not None:
        WS.drop(tmp)
    return result, probs_out, rows
