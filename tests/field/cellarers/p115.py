"""Key/value cache blocks of an inference server; free blocks are flags in a tensor."""
import torch


class BlockPool:
    def __init__(self, blocks, heads, dim, device="cpu"):
        self.free = torch.ones(blocks, dtype=torch.bool, device=device)
        self.data = torch.zeros(blocks, heads, dim, device=device)

    def grab_blocks(self, n):
        idx = torch.nonzero(self.free).flatten()[:n]
        if idx.numel() < n:
            return None
        self.free[idx] = False
        return idx

    def free_blocks(self, idx):
        self.data[idx] = 0
        self.free[idx] = True


class Scheduler:
    def __init__(self, pool, model):
        self.pool = pool
        self.model = model
        self.running = {}

    def admit(self, req):
        idx = self.pool.grab_blocks(req.blocks)  # clean: stored under the request, freed by finish()
        if idx is None:
            return False
        self.running[req.id] = idx
        return True

    def finish(self, req_id):
        self.pool.free_blocks(self.running.pop(req_id))

    def score(self, prompt):
        idx = self.pool.grab_blocks(len(prompt))  # clean: freed after the forward pass
        if idx is None:
            return None
        logits = self.model(prompt, self.pool.data[idx])
        self.pool.free_blocks(idx)
        return logits

    def probe(self, prompt, limit):
        idx = self.pool.grab_blocks(len(prompt))  # leak: a too high loss returns before the blocks are freed
        if idx is None:
            return None
        loss = float(self.model(prompt, self.pool.data[idx]).mean())
        if loss > limit:
            return None
        self.pool.free_blocks(idx)
        return loss

    def grow(self, req_id, n):
        more = self.pool.grab_blocks(n)  # leak: the new blocks are counted, not kept
        if more is None:
            return 0
        return int(more.numel())
