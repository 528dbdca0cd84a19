"""CUDA graph capture and replay with pooled static input buffers."""
from __future__ import annotations

import bisect
from dataclasses import dataclass

import torch

CAPTURE_SIZES = [1, 2, 4, 8, 16, 32, 64]


class Workspace:
    """Static buffers by size class; take() and put() are the only ways in and out."""

    def __init__(self, hidden: int, per_size: int):
        self.hidden = hidden
        self._bins = {s: [torch.zeros(s, hidden) for _ in range(per_size)] for s in CAPTURE_SIZES}
        self.outstanding = 0

    def take(self, size: int) -> torch.Tensor | None:
        bin_ = self._bins[size]
        if not bin_:
            return None
        self.outstanding += 1
        return bin_.pop()

    def put(self, buf: torch.Tensor) -> None:
        self.outstanding -= 1
        self._bins[buf.shape[0]].append(buf)


@dataclass
class CapturedGraph:
    graph: torch.cuda.CUDAGraph
    static_in: torch.Tensor
    static_out: torch.Tensor
    replays: int = 0


def padded_size(n: int) -> int | None:
    i = bisect.bisect_left(CAPTURE_SIZES, n)
    return CAPTURE_SIZES[i] if i < len(CAPTURE_SIZES) else None


class GraphRunner:
    def __init__(self, model, ws: Workspace):
        self.model = model
        self.ws = ws
        self.graphs: dict[int, CapturedGraph] = {}
        self.use_graphs = True

    # ---- capture -------------------------------------------------------
    def capture(self, size: int) -> bool:
        if size in self.graphs:
            return True
        static_in = self.ws.take(size)  # leak: not put back when no output buffer is to be had
        if static_in is None:
            return False
        static_out = self.ws.take(size)  # clean: kept in the captured graph, dropped by drop()
        if static_out is None:
            self.use_graphs = bool(self.graphs)
            return False
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static_out.copy_(self.model(static_in))
        self.graphs[size] = CapturedGraph(graph, static_in, static_out)
        return True

    def drop(self, size: int) -> None:
        entry = self.graphs.pop(size, None)
        if entry is not None:
            entry.graph.reset()
            self.ws.put(entry.static_in)
            self.ws.put(entry.static_out)

    def shutdown(self) -> None:
        for size in list(self.graphs):
            self.drop(size)

    # ---- execution -----------------------------------------------------
    def _pad(self, x: torch.Tensor) -> torch.Tensor | None:
        size = padded_size(x.shape[0])
        if size is None:
            return None
        buf = self.ws.take(size)  # clean: returned to the caller
        if buf is None:
            return None
        buf.zero_()
        buf[: x.shape[0]].copy_(x)
        return buf

    def run(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        size = padded_size(n)
        if self.use_graphs and size in self.graphs:
            entry = self.graphs[size]
            entry.static_in[:n].copy_(x)
            entry.graph.replay()
            entry.replays += 1
            return entry.static_out[:n].clone()
        return self.run_eager(x)

    def run_eager(self, x: torch.Tensor) -> torch.Tensor:
        padded = self._pad(x)  # leak: the output is cut out and the padded input is never put back
        if padded is None:
            return self.model(x)
        out = self.model(padded)
        return out[: x.shape[0]].clone()

    def run_residual(self, x: torch.Tensor, want_residual: bool) -> torch.Tensor:
        size = padded_size(x.shape[0])
        if size is None:
            return self.model(x)
        residual = None
        if want_residual:
            residual = self.ws.take(size)  # clean: near miss, put under the same condition at the end
        out = self.model(x)
        if want_residual and residual is not None:
            residual[: x.shape[0]].copy_(x)
            out = out + residual[: x.shape[0]]
            self.ws.put(residual)
        return out

    def run_scaled(self, x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        size = padded_size(x.shape[0])
        if size is None:
            return self.model(x)
        tmp = self.ws.take(size)  # leak: without a scale the buffer is not put back
        if tmp is None:
            return self.model(x)
        tmp[: x.shape[0]].copy_(x)
        out = self.model(tmp)[: x.shape[0]].clone()
        if scale is not None:
            out.mul_(scale)
            self.ws.put(tmp)
        return out

    def ping_pong(self, x: torch.Tensor, layers: list) -> torch.Tensor:
        """Alternate between two buffers through the layers."""
        n = x.shape[0]
        size = padded_size(n)
        src = self.ws.take(size)  # clean: near miss, src and dst swap names but both are put
        if src is None:
            return self.model(x)
        dst = self.ws.take(size)  # clean: near miss, swapped with src and put in the end
        if dst is None:
            self.ws.put(src)
            return self.model(x)
        src[:n].copy_(x)
        for layer in layers:
            dst.copy_(layer(src))
            src, dst = dst, src
        result = src[:n].clone()
        self.ws.put(src)
        self.ws.put(dst)
        return result

    def chain(self, x: torch.Tensor, layers: list) -> torch.Tensor:
        n = x.shape[0]
        size = padded_size(n)
        cur = self.ws.take(size)  # clean: put in the first iteration or after the loop
        if cur is None:
            return self.model(x)
        cur[:n].copy_(x)
        for layer in layers:
            nxt = self.ws.take(size)  # clean: becomes cur, which is put on the next turn or at the end
            if nxt is None:
                cur.copy_(layer(cur))
                continue
            nxt.copy_(layer(cur))
            self.ws.put(cur)
            cur = nxt
        result = cur[:n].clone()
        self.ws.put(cur)
        return result

    def chain_residual(self, x: torch.Tensor, layers: list) -> torch.Tensor:
        n = x.shape[0]
        hidden = x
        held = None
        for layer in layers:
            held = self.ws.take(padded_size(n))  # leak: overwritten by each next layer, only the last one is put
            if held is None:
                hidden = layer(hidden)
                continue
            held[:n].copy_(hidden)
            hidden = layer(held[:n]) + hidden
        if held is not None:
            self.ws.put(held)
        return hidden


def largest_free(ws: Workspace) -> int:
    for size in reversed(CAPTURE_SIZES):
        buf = ws.take(size)  # leak: the buffer found is only measured, return without put
        if buf is not None:
            return buf.shape[0]
    return 0
