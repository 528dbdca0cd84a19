from typing import Callable, Dict, List, Optional

from .pools import LoraSlots, PagePool, SlotPool
from .request import Request, Status
from .scheduler import Scheduler

ModelFn = Callable[[List[Request]], List[int]]


class Engine:
    def __init__(self, model: ModelFn, num_pages: int = 1024, max_batch: int = 32, page_size: int = 16, eos: int = 2):
        self.pages = PagePool(num_pages)
        self.samplers = SlotPool(max_batch * 2)
        self.sched = Scheduler(self.pages, SlotPool(max_batch), LoraSlots(8), page_size)
        self.model = model
        self.eos = eos
        self.dummy = self.pages.get_pages(1)  # clean: the padding page, kept until close
        self.beams: Dict[int, List[int]] = {}

    def add(self, req: Request, lora_id: Optional[int] = None) -> bool:
        row = self.samplers.occupy()  # leak: abort of a request goes through finish only, its sampler row stays occupied
        if row is None:
            return False
        req.sampler_row = row
        if lora_id is not None:
            self.sched.lora_of[req.rid] = lora_id
        self.sched.waiting.append(req)
        return True

    def step(self) -> List[Request]:
        self.sched.admit()
        self.sched.grow()
        batch = list(self.sched.running)
        done: List[Request] = []
        for req, tok in zip(batch, self.model(batch)):
            req.output.append(tok)
            if tok == self.eos or len(req.output) >= req.max_new:
                self.sched.finish(req, Status.FINISHED)
                self._drop_row(req)
                self.close_beams(req.rid)
                done.append(req)
        return done

    def _drop_row(self, req: Request) -> None:
        if req.sampler_row is not None:
            self.samplers.vacate(req.sampler_row)
            req.sampler_row = None

    def abort(self, rid: int) -> bool:
        req = self.sched.find(rid)
        if req is None:
            return False
        self.sched.finish(req, Status.ABORTED)
        self.close_beams(rid)
        return True

    def open_beams(self, rid: int, width: int) -> bool:
        rows: List[int] = []
        for _ in range(width):
            row = self.samplers.occupy()  # clean: near miss, too few are vacated again, else listed under the request
            if row is None:
                for r in rows:
                    self.samplers.vacate(r)
                return False
            rows.append(row)
        self.beams.setdefault(rid, []).extend(rows)
        return True

    def widen_beams(self, rid: int, width: int) -> bool:
        rows: List[int] = []
        while len(rows) < width:
            row = self.samplers.occupy()  # leak: the rows listed for the request before are overwritten
            if row is None:
                break
            rows.append(row)
        if not rows:
            return False
        self.beams[rid] = rows
        return True

    def close_beams(self, rid: int) -> None:
        for row in self.beams.pop(rid, []):
            self.samplers.vacate(row)

    def warmup(self, sizes: List[int]) -> int:
        for n in sizes:
            pages = self.pages.get_pages(n)  # clean: near miss, put back before the model's answer is judged
            if pages is None:
                continue
            out = self.model([Request([0], 1, pages=pages)])
            self.pages.put_pages(pages)
            if not out:
                return n
        return 0

    def close(self) -> None:
        for req in list(self.sched.running):
            self.sched.finish(req, Status.ABORTED)
            self._drop_row(req)
            self.close_beams(req.rid)
        if self.dummy is not None:
            self.pages.put_pages(self.dummy)
            self.dummy = None
