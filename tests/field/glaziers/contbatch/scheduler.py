from typing import Deque, Dict, List, Optional
from collections import deque

from .pools import LoraSlots, PagePool, SlotPool
from .request import Request, Status


class Scheduler:
    def __init__(self, pages: PagePool, slots: SlotPool, loras: LoraSlots, page_size: int):
        self.pages = pages
        self.slots = slots
        self.loras = loras
        self.page_size = page_size
        self.waiting: Deque[Request] = deque()
        self.running: List[Request] = []
        self.lora_of: Dict[int, int] = {}

    def _pages_for(self, n: int) -> int:
        return -(-n // self.page_size)

    def admit(self) -> List[Request]:
        admitted: List[Request] = []
        while self.waiting:
            req = self.waiting[0]
            slot = self.slots.occupy()  # clean: near miss, vacated when the pages or the adapter fail
            if slot is None:
                break
            pages = self.pages.get_pages(self._pages_for(req.length))  # leak: no free adapter slot breaks out without putting them back
            if pages is None:
                self.slots.vacate(slot)
                break
            lora_id = self.lora_of.get(req.rid)
            if lora_id is not None:
                lora_slot = self.loras.attach(lora_id)  # clean: the request's, release detaches it
                if lora_slot is None:
                    self.slots.vacate(slot)
                    break
                req.lora_slot = lora_slot
            self.waiting.popleft()
            req.batch_slot, req.pages = slot, pages
            req.status = Status.RUNNING
            self.running.append(req)
            admitted.append(req)
        return admitted

    def admit_encdec(self, req: Request, enc_len: int) -> bool:
        cross = self.pages.get_aligned(self._pages_for(enc_len), 4)  # leak: preempt puts back pages only and clears the cross pages
        if cross is None:
            return False
        pages = self.pages.get_pages(self._pages_for(req.length))  # clean: near miss, None with cross put back, else release puts back both
        if pages is None:
            self.pages.put_pages(cross)
            return False
        req.cross_pages, req.pages = cross, pages
        req.status = Status.RUNNING
        self.running.append(req)
        return True

    def grow(self) -> None:
        for req in list(self.running):
            if req not in self.running:
                continue
            if len(req.pages) >= self._pages_for(req.length + 1):
                continue
            more = self.pages.get_pages(1)  # clean: near miss, taken again only after None, then joined to the request
            while more is None:
                victim = min(self.running, key=lambda r: r.priority)
                self.preempt(victim)
                if victim is req:
                    break
                more = self.pages.get_pages(1)  # clean: near miss, when the victim is req itself none was taken
            if more is not None:
                req.pages.extend(more)

    def release(self, req: Request) -> None:
        self.pages.put_pages(req.pages)
        self.pages.put_pages(req.cross_pages)
        req.pages, req.cross_pages = [], []
        if req.batch_slot is not None:
            self.slots.vacate(req.batch_slot)
            req.batch_slot = None
        if req.lora_slot is not None:
            self.loras.detach(req.lora_slot)
            req.lora_slot = None

    def preempt(self, req: Request) -> None:
        self.running.remove(req)
        self.pages.put_pages(req.pages)
        req.pages, req.cross_pages = [], []
        if req.batch_slot is not None:
            self.slots.vacate(req.batch_slot)
            req.batch_slot = None
        if req.lora_slot is not None:
            self.loras.detach(req.lora_slot)
            req.lora_slot = None
        req.status = Status.PREEMPTED
        self.waiting.appendleft(req)

    def finish(self, req: Request, status: Status) -> None:
        self.running.remove(req)
        self.release(req)
        req.status = status

    def find(self, rid: int) -> Optional[Request]:
        return next((r for r in self.running if r.rid == rid), None)
