from __future__ import annotations

from typing import Any, Iterator

from .request import Request
from .scheduler import Scheduler


class Engine:
    def __init__(self, scheduler: Scheduler, runner: Any, eos: int) -> None:
        self.sched = scheduler
        self.runner = runner
        self.eos = eos
        self.sidecar: dict[str, list[int]] = {}

    def step(self) -> list[Request]:
        done = []
        for req in self.sched.schedule():
            if req not in self.sched.running:
                continue
            if not self.sched.grow(req):
                self.sched.preempt(req)
                continue
            tok = self.runner.decode(req.row, req.blocks, req.image_slot)
            req.output.append(tok)
            if tok == self.eos or len(req.output) >= req.max_tokens:
                self.sched.finish(req)
                done.append(req)
        return done

    def run_until_idle(self) -> Iterator[Request]:
        while self.sched.waiting or self.sched.running:
            yield from self.step()

    def profile(self, tokens: int) -> bool:
        blocks = self.sched.blocks.allocate(self.sched.blocks.blocks_for(tokens))  # clean: near miss, freed after the dummy pass and also when there was no row
        if blocks is None:
            return False
        row = self.sched.rows.acquire_row()  # clean: released after the dummy pass
        if row is not None:
            self.runner.decode(row, blocks, None)
            self.sched.rows.release_row(row)
        self.sched.blocks.free(blocks)
        return row is not None

    def embed_image(self, pixels: Any) -> Any | None:
        slot = self.sched.images.occupy()  # leak: an encoder that answers None returns with the slot occupied
        if slot is None:
            return None
        feats = self.runner.encode(slot, pixels)
        if feats is None:
            return None
        self.sched.images.vacate(slot)
        return feats

    def embed_images(self, batch: list[Any]) -> list[Any]:
        out = []
        slot = self.sched.images.occupy()  # clean: near miss, one slot serves the batch, the break ends before vacate
        if slot is None:
            return out
        for pixels in batch:
            feats = self.runner.encode(slot, pixels)
            if feats is None:
                break
            out.append(feats)
        self.sched.images.vacate(slot)
        return out

    def score(self, prompt: list[int], lora: str | None) -> float | None:
        if lora is not None and not self.sched.adapters.enter(lora):  # clean: near miss, left under the same condition in the finally
            return None
        try:
            return self.runner.logprob(prompt, lora)
        finally:
            if lora is not None:
                self.sched.adapters.leave(lora)

    def lower_row(self, req: Request) -> bool:
        row = self.sched.rows.acquire_row()  # leak: a row that is not lower than the present one is neither used nor released
        if row is None or req.row is None or row > req.row:
            return False
        self.runner.move_row(req.row, row)
        self.sched.rows.release_row(req.row)
        req.row = row
        return True

    def attach_sidecar(self, name: str, n: int) -> bool:
        """Scratch blocks for a plugin, e.g. a reward head."""
        if name in self.sidecar:
            return True
        blocks = self.sched.blocks.allocate(n)  # clean: in sidecar until detach_sidecar
        if blocks is None:
            return False
        self.sidecar[name] = blocks
        return True

    def resize_sidecar(self, name: str, n: int) -> bool:
        blocks = self.sched.blocks.allocate(n)  # leak: the blocks that the plugin had are replaced and never freed
        if blocks is None:
            return False
        self.sidecar[name] = blocks
        return True

    def detach_sidecar(self, name: str) -> None:
        self.sched.blocks.free(self.sidecar.pop(name, []))
