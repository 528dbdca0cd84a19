import logging

import torch

from .heap import HeapFull

log = logging.getLogger(__name__)


class MoELayer(torch.nn.Module):
    def __init__(self, gate, dispatcher, cache, local_experts, overlap=False):
        super().__init__()
        self.gate = gate
        self.dispatcher = dispatcher
        self.cache = cache
        self.local_experts = local_experts
        self.overlap = overlap
        self._deferred = None
        self.dense_fallbacks = 0

    def _run_local(self, handle, dtype):
        rows = int(handle.counts.sum())
        tokens = handle.recv.as_tensor((rows, self.dispatcher.hidden), dtype)
        out, at = torch.empty_like(tokens), 0
        for ident, n in zip(self.local_experts, handle.counts.tolist()):
            w = self.cache.use(ident)  # leak: an expert without tokens takes the continue and stays in use
            if n == 0:
                continue
            kernel = w.weight.as_tensor((self.dispatcher.hidden, self.dispatcher.hidden), dtype)
            out[at:at + n] = tokens[at:at + n] @ kernel
            at += n
            self.cache.done(w)
        return out

    def forward(self, x):
        scores, experts = self.gate(x).max(-1)
        try:
            handle = self.dispatcher.dispatch(x, experts)  # leak: nothing received returns the input before finish()
        except HeapFull:
            self.dense_fallbacks += 1
            return self._dense(x, experts, scores)
        if int(handle.counts.sum()) == 0:
            return x
        y = self._run_local(handle, x.dtype)
        out = torch.empty_like(x)
        self.dispatcher.combine(handle, y, out)
        handle.finish()
        return out * scores.unsqueeze(-1)

    def forward_deferred(self, x):
        """The combine is left to flush(), so that attention can run meanwhile."""
        scores, experts = self.gate(x).max(-1)
        handle = self.dispatcher.dispatch(x, experts)  # leak: a second call ahead of flush() overwrites the deferred handle
        self._deferred = (handle, self._run_local(handle, x.dtype), x, scores)

    def flush(self):
        if self._deferred is None:
            return None
        handle, y, x, scores = self._deferred
        self._deferred = None
        out = torch.empty_like(x)
        try:
            self.dispatcher.combine(handle, y, out)
        finally:
            handle.finish()
        return out * scores.unsqueeze(-1)

    def _dense(self, x, experts, scores):
        out = torch.zeros_like(x)
        for ident in experts.unique().tolist():
            w = self.cache.use(ident)  # clean: done in the finally
            try:
                rows = experts == ident
                out[rows] = x[rows] @ w.weight.as_tensor((x.shape[1], x.shape[1]), x.dtype)
            finally:
                self.cache.done(w)
        return out * scores.unsqueeze(-1)

    def benchmark(self, x, rounds):
        experts = self.gate(x).argmax(-1)
        handles = []
        try:
            for _ in range(rounds):
                handles.append(self.dispatcher.dispatch(x, experts))  # clean: a full heap ends the loop, all are finished
        except HeapFull:
            log.info("%d dispatches fit", len(handles))
        finally:
            for h in handles:
                h.finish()
        return len(handles)
