"""Chunked linear-recurrence scan; scratch comes from a heap that finds a storage through any view of it."""
import math

import torch


class ScratchHeap:
    def __init__(self, device, dtype=torch.float32):
        self.device = device
        self.dtype = dtype
        self._idle = []
        self._live = {}

    def borrow(self, *shape):
        numel = math.prod(shape)
        for i, flat in enumerate(self._idle):
            if flat.numel() >= numel:
                del self._idle[i]
                break
        else:
            flat = torch.empty(numel, dtype=self.dtype, device=self.device)
        self._live[flat.untyped_storage().data_ptr()] = flat
        return flat[:numel].view(shape)

    def restore(self, view):
        self._idle.append(self._live.pop(view.untyped_storage().data_ptr()))


def decay_matrix(heap, log_a):
    """exp of segment sums of one chunk [b, h, n] as [b, h, n, n] scratch; the caller restores it."""
    n = log_a.shape[-1]
    sums = torch.cumsum(log_a, -1)
    mat = heap.borrow(*log_a.shape, n)  # clean: handed to the caller
    torch.sub(sums.unsqueeze(-1), sums.unsqueeze(-2), out=mat)
    return mat.exp_().tril_()


def advance(heap, state, key, value, total):
    """The state after one more chunk, in scratch of its own; the old state is left alone."""
    after = heap.borrow(*state.shape)  # clean: handed to the caller
    torch.matmul(key.transpose(-1, -2), value, out=after)
    after.add_(state * total[..., None, None])
    return after


def scan_forward(heap, q, k, v, log_a, chunk, init=None, want_final=False, out=None):
    """y[t] = q[t] S[t], S[t] = a[t] S[t-1] + k[t] v[t]^T, over [b, h, t, d]; the remainder goes last."""
    b, h, seq, dk = q.shape
    dv = v.shape[-1]
    full, rest = divmod(seq, chunk)
    y = torch.empty(b, h, seq, dv, device=q.device, dtype=v.dtype) if out is None else out
    halves = heap.borrow(2, b, h, dk, dv)  # clean: near miss, restored through whichever half is the state
    state, spare = halves.unbind(0)
    if init is None:
        state.zero_()
    else:
        state.copy_(init)
    for i in range(full):
        rows = slice(i * chunk, (i + 1) * chunk)
        qc, kc, vc, ac = (t[:, :, rows].float() for t in (q, k, v, log_a.unsqueeze(-1)))
        ac = ac.squeeze(-1)
        grown = torch.cumsum(ac, -1)
        mat = decay_matrix(heap, ac)  # clean: near miss, scores is the same storage, changed in place
        scores = mat.mul_(qc @ kc.transpose(-1, -2))
        local = heap.borrow(b, h, chunk, dv)  # clean: near miss, restored through its transpose
        torch.matmul(scores, vc, out=local)
        local.add_((qc * grown.exp().unsqueeze(-1)) @ state)
        y[:, :, rows].copy_(local)
        heap.restore(scores)
        flipped = local.transpose(1, 2)
        heap.restore(flipped)
        left = (grown[..., -1:] - grown).exp().unsqueeze(-1)
        torch.matmul((kc * left).transpose(-1, -2), vc, out=spare)
        spare.add_(state * grown[..., -1].exp()[..., None, None])
        state, spare = spare, state
    if rest:
        qc, kc, vc = (t[:, :, full * chunk:].float() for t in (q, k, v))
        ac = log_a[:, :, full * chunk:].float()
        grown = torch.cumsum(ac, -1)
        scores = decay_matrix(heap, ac) * (qc @ kc.transpose(-1, -2))  # leak: multiplied into a new tensor
        tail = heap.borrow(b, h, rest, dv)  # clean: restored after the copy
        torch.matmul(scores, vc, out=tail)
        tail.add_((qc * grown.exp().unsqueeze(-1)) @ state)
        y[:, :, full * chunk:].copy_(tail)
        heap.restore(tail)
        if want_final:
            left = (grown[..., -1:] - grown).exp().unsqueeze(-1)
            spare.copy_(state * grown[..., -1].exp()[..., None, None])
            spare.add_((kc * left).transpose(-1, -2) @ vc)
            state, spare = spare, state
    final = state.clone() if want_final else None
    heap.restore(state)
    return y, final


def scan_backward(heap, q, k, v, log_a, grad, chunk):
    """Gradients of q, k and v; the states between chunks are computed again and kept for the way back."""
    b, h, seq, dk = q.shape
    dv = v.shape[-1]
    count = seq // chunk
    if count == 0 or count * chunk != seq:
        raise ValueError("pad the sequence to whole chunks")
    dq, dkey, dval = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    totals, states = [], []
    state = heap.borrow(b, h, dk, dv)  # clean: near miss, listed as the first state, restored on the way back
    state.zero_()
    for i in range(count):
        rows = slice(i * chunk, (i + 1) * chunk)
        grown = torch.cumsum(log_a[:, :, rows].float(), -1)
        left = (grown[..., -1:] - grown).exp().unsqueeze(-1)
        states.append(state)
        totals.append(grown[..., -1].exp())
        state = advance(heap, state, k[:, :, rows].float() * left, v[:, :, rows].float(), totals[-1])  # leak: the last
    back = heap.borrow(b, h, dk, dv)  # leak: rebound on the first turn of the way back
    back.zero_()
    for i, before in zip(reversed(range(count)), reversed(states)):
        rows = slice(i * chunk, (i + 1) * chunk)
        qc, kc, vc, gc = (t[:, :, rows].float() for t in (q, k, v, grad))
        ac = log_a[:, :, rows].float()
        grown = torch.cumsum(ac, -1)
        mat = decay_matrix(heap, ac)  # clean: restored after the three products
        inner = heap.borrow(b, h, chunk, chunk)  # clean: near miss, restored through its transpose
        torch.matmul(gc, vc.transpose(-1, -2), out=inner)
        inner.mul_(mat)
        dq[:, :, rows].copy_(inner @ kc + (gc @ before.transpose(-1, -2)) * grown.exp().unsqueeze(-1))
        left = (grown[..., -1:] - grown).exp().unsqueeze(-1)
        turned = inner.transpose(-1, -2)
        dkey[:, :, rows].copy_(turned @ qc + (vc @ back.transpose(-1, -2)) * left)
        mixed = (qc @ kc.transpose(-1, -2)).mul_(mat)
        dval[:, :, rows].copy_(mixed.transpose(-1, -2) @ gc + (kc * left) @ back)
        heap.restore(turned)
        heap.restore(mat)
        back = advance(heap, back, qc * grown.exp().unsqueeze(-1), gc, totals[i])  # leak: each overwrites the one before
        heap.restore(before)
    initial = back.clone()
    heap.restore(back)
    return dq, dkey, dval, initial


def stream_scan(heap, chunks, dk, dv, batch, heads, on_state=None):
    """Generator of outputs for chunks that arrive one by one, with the state carried between them."""
    state = heap.borrow(batch, heads, dk, dv)  # clean: near miss, given for each newer state, the last in the finally
    state.zero_()
    step = 0
    try:
        for qc, kc, vc, ac in chunks:
            grown = torch.cumsum(ac, -1)
            mat = decay_matrix(heap, ac)  # clean: near miss, restored before the check on the shape
            mat.mul_(qc @ kc.transpose(-1, -2))
            local = mat @ vc
            heap.restore(mat)
            if qc.shape[-2] == 0:
                continue
            y = local + (qc * grown.exp().unsqueeze(-1)) @ state
            left = (grown[..., -1:] - grown).exp().unsqueeze(-1)
            newer = advance(heap, state, kc * left, vc, grown[..., -1].exp())  # clean: near miss, becomes the state
            state, older = newer, state
            heap.restore(older)
            if on_state is not None:
                on_state(step, state.clone())
            step += 1
            yield y
    finally:
        heap.restore(state)


def effective_span(heap, log_a, chunk, floor=1e-3):
    """Mean number of earlier positions in a chunk whose weight is over the floor."""
    counts = []
    for piece in log_a.float().split(chunk, dim=-1):
        if piece.shape[-1] < 2:
            continue
        reach = (decay_matrix(heap, piece) > floor).sum(-1)  # leak: compared and reduced, the matrix is dropped
        counts.append(reach.float().mean())
    return torch.stack(counts).mean() if counts else torch.zeros(())
