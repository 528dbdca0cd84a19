"""Planning of batched attention: workspaces, split-K partials and captured graphs."""
import torch

_SIZES = (1 << 16, 1 << 20, 1 << 24)
_spare = {size: [] for size in _SIZES}


def grab_workspace(nbytes):
    for size in _SIZES:
        if nbytes <= size:
            shelf = _spare[size]
            return shelf.pop() if shelf else torch.empty(size, dtype=torch.uint8, device="cuda")
    raise ValueError(f"no workspace of {nbytes} bytes")


def put_workspace(ws):
    _spare[ws.numel()].append(ws)


class IndexRing:
    """Pinned index arrays for indptr / indices / last_page_len."""

    def __init__(self, n, length):
        self.ring = [torch.empty(length, dtype=torch.int32, pin_memory=True) for _ in range(n)]

    def next_array(self):
        return self.ring.pop(0)

    def rejoin(self, arr):
        self.ring.append(arr)


class DecodePlan:
    def __init__(self, heads, head_dim):
        self.heads, self.head_dim = heads, head_dim
        self.float_ws = None
        self.int_ws = None
        self.partials = []
        self.batch = 0

    def plan(self, indptr, max_batch):
        self.batch = len(indptr) - 1
        self.float_ws = grab_workspace(self.batch * self.heads * self.head_dim * 4)  # leak: a second plan overwrites it
        if self.int_ws is None:
            self.int_ws = grab_workspace(max_batch * 4)  # clean: near miss, only when absent, end() puts it
        splits = max(1, int(indptr[-1]) // 2048)
        self._drop_partials()
        for _ in range(splits):
            self.partials.append(grab_workspace(self.heads * self.head_dim * 4))  # clean: near miss, end puts it
        return splits

    def _drop_partials(self):
        while self.partials:
            put_workspace(self.partials.pop())

    def run(self, q, kernel):
        out = torch.empty_like(q)
        for part in self.partials:
            kernel(q, part, self.float_ws, self.int_ws, out)
        return out

    def end(self):
        if self.float_ws is not None:
            put_workspace(self.float_ws)
        if self.int_ws is not None:
            put_workspace(self.int_ws)
        self.float_ws = self.int_ws = None
        self._drop_partials()


class PrefillPlan:
    def __init__(self, ring: IndexRing):
        self.ring = ring
        self.arrays = {}
        self.mask = None

    def plan(self, qo, kv, mask_bytes=0):
        self.end()
        self.arrays["qo"] = self._fill(qo)  # clean: near miss, end() rejoins every array of the dict
        self.arrays["kv"] = self._fill(kv)  # clean: near miss, end() rejoins every array of the dict
        if mask_bytes:
            self.mask = grab_workspace(mask_bytes)  # leak: end() sets the field to None and never puts it
        return len(qo) - 1

    def _fill(self, values):
        arr = self.ring.next_array()  # clean: near miss, handed to the caller
        arr[:len(values)].copy_(torch.as_tensor(values, dtype=torch.int32))
        return arr

    def end(self):
        for arr in self.arrays.values():
            self.ring.rejoin(arr)
        self.arrays = {}
        self.mask = None


class GraphRunner:
    """One captured graph for each batch size, with its static input workspace and indices."""

    def __init__(self, ring: IndexRing, max_graphs):
        self.ring = ring
        self.max_graphs = max_graphs
        self.graphs = {}
        self.order = []

    def capture(self, batch, fn):
        if batch in self.graphs:
            return self.graphs[batch]["graph"]
        if len(self.graphs) >= self.max_graphs:
            self._evict()
        static_in = grab_workspace(batch * 8192)  # clean: near miss, _evict and invalidate both put it
        idx = self.ring.next_array()  # leak: _evict drops the record with its index array
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fn(static_in, idx)
        self.graphs[batch] = {"graph": graph, "input": static_in, "index": idx}
        self.order.append(batch)
        return graph

    def _evict(self):
        record = self.graphs.pop(self.order.pop(0))
        put_workspace(record["input"])
        record["graph"].reset()

    def invalidate(self):
        """Weights were swapped: every graph is stale."""
        for record in self.graphs.values():
            put_workspace(record["input"])
            self.ring.rejoin(record["index"])
        self.graphs.clear()
        self.order.clear()


def replan_all(plans, table, max_batch):
    planned = 0
    for name, indptr in table.items():
        if len(indptr) < 2:
            continue
        plans[name].plan(indptr, max_batch)
        planned += 1
    return planned
