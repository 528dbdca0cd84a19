"""LIFO of prebuilt attention masks, guarded by an RLock, with a thin functional face."""
import threading


class _MaskStack:
    def __init__(self):
        self.lock = threading.RLock()
        self.items = []
        self.out = 0


_stack = _MaskStack()


def pop_mask(n):
    with _stack.lock:
        for pos in range(len(_stack.items) - 1, -1, -1):
            if len(_stack.items[pos]) >= n:
                _stack.out += 1
                return _stack.items.pop(pos)
        _stack.out += 1
    return [[j <= i for j in range(n)] for i in range(n)]


def push_mask(mask):
    with _stack.lock:
        _stack.out -= 1
        _stack.items.append(mask)


def masked_scores(kernel, q, k):
    mask = pop_mask(q.length)  # clean: pushed in finally
    try:
        return kernel.scores(q, k, mask)
    finally:
        push_mask(mask)


def causal_softmax(kernel, scores):
    mask = pop_mask(scores.length)  # leak: a decode step returns without pushing
    if scores.length == 1:
        return kernel.softmax(scores)
    out = kernel.masked_softmax(scores, mask)
    push_mask(mask)
    return out


def packed_mask(lengths):
    mask = pop_mask(sum(lengths))  # clean: handed to the caller
    start = 0
    for n in lengths:
        for row in mask[start + n:]:
            row[start:start + n] = [False] * n
        start += n
    return mask


def packed_scores(kernel, q, k, lengths):
    mask = packed_mask(lengths)  # clean: pushed after the call
    out = kernel.scores(q, k, mask)
    push_mask(mask)
    return out


def check_packed(kernel, q, k, lengths):
    mask = packed_mask(lengths)  # leak: only pushed when the kernel agrees
    ok = kernel.verify(q, k, mask)
    if ok:
        push_mask(mask)
    return ok
