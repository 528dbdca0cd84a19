from dataclasses import dataclass


class BlockAllocator:
    def __init__(self, total):
        self._free = list(range(total))
        self.in_use = 0

    def allocate(self):
        if not self._free:
            return None
        self.in_use += 1
        return self._free.pop()

    def release(self, block):
        self.in_use -= 1
        self._free.append(block)


@dataclass
class Running:
    prompt: list
    block: int
    draft_block: int
    produced: int = 0


class Engine:
    def __init__(self, allocator, limit):
        self.allocator = allocator
        self.limit = limit
        self.running = {}
        self.waiting = []
        self.scratch = allocator.allocate()  # clean: shutdown releases it
        self.graph_block = allocator.allocate()  # leak: shutdown sets it to None without release

    def admit(self, rid, prompt):
        if rid in self.running or len(self.running) >= self.limit:
            return False
        block = self.allocator.allocate()  # clean: finish and the failed path release it
        if block is None:
            self.waiting.append((rid, prompt))
            return False
        draft = self.allocator.allocate()  # leak: finish gives back only the main block
        if draft is None:
            self.allocator.release(block)
            self.waiting.append((rid, prompt))
            return False
        self.running[rid] = Running(list(prompt), block, draft)
        return True

    def step(self):
        done = []
        for rid, run in self.running.items():
            run.produced += 1
            if run.produced >= len(run.prompt) * 2:
                done.append(rid)
        for rid in done:
            self.finish(rid)
        return done

    def finish(self, rid):
        run = self.running.pop(rid, None)
        if run is None:
            return 0
        self.allocator.release(run.block)
        if self.waiting:
            self.admit(*self.waiting.pop(0))
        return run.produced

    def warm_up(self):
        probe = self.allocator.allocate()  # clean: released below
        if probe is None:
            return 0
        used = self.allocator.in_use
        self.allocator.release(probe)
        return used

    def shutdown(self):
        self.waiting.clear()
        for rid in list(self.running):
            self.finish(rid)
        if self.scratch is not None:
            self.allocator.release(self.scratch)
        self.scratch = self.graph_block = None
