"""CAN bus driver: hardware mailboxes, DMA descriptors and interrupt masking."""
from __future__ import annotations

import logging
import struct
import threading
from collections import deque
from contextlib import contextmanager
from typing import Callable, Optional

log = logging.getLogger("can")
TX_OK, TX_ABORTED, BUS_OFF = 1, 2, 4


class MailboxBank:
    """Bit map of transmit mailboxes."""

    def __init__(self, regs, count: int = 16) -> None:
        self.regs = regs
        self._map = (1 << count) - 1

    def claim(self) -> Optional[int]:
        if not self._map:
            return None
        index = (self._map & -self._map).bit_length() - 1
        self._map &= ~(1 << index)
        return index

    def yield_up(self, index: int) -> None:
        self._map |= 1 << index


class DmaDescriptor:
    def __init__(self, slot: int, memory: memoryview) -> None:
        self.slot = slot
        self.memory = memory
        self.length = 0


class DmaArena:
    def __init__(self, block: int, count: int) -> None:
        self._ram = memoryview(bytearray(block * count))
        self._free = [DmaDescriptor(i, self._ram[i * block : (i + 1) * block]) for i in range(count)]

    def map(self, size: int) -> Optional[DmaDescriptor]:
        if not self._free:
            return None
        desc = self._free.pop()
        desc.length = size
        return desc

    def unmap(self, desc: DmaDescriptor) -> None:
        desc.length = 0
        self._free.append(desc)


class IrqGate:
    """Nesting interrupt mask. Every mask() wants one unmask()."""

    def __init__(self, regs) -> None:
        self.regs = regs
        self.depth = 0

    def mask(self) -> int:
        self.depth += 1
        if self.depth == 1:
            self.regs.write("IMASK", 0)
        return self.depth

    def unmask(self) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.regs.write("IMASK", 0xFFFF)

    @contextmanager
    def masked(self):
        self.mask()  # clean: unmasked in the finally
        try:
            yield
        finally:
            self.unmask()


class CanController:
    def __init__(self, regs, mailboxes: MailboxBank, arena: DmaArena) -> None:
        self.regs = regs
        self.mailboxes = mailboxes
        self.arena = arena
        self.irq = IrqGate(regs)
        self.on_air: dict[int, tuple[DmaDescriptor, Optional[Callable[[bool], None]]]] = {}
        self.backlog: deque[bytes] = deque()
        self.errors = 0
        self._bounce: Optional[DmaDescriptor] = None

    def transmit(self, ident: int, payload: bytes, done: Optional[Callable[[bool], None]] = None) -> bool:
        box = self.mailboxes.claim()  # leak: without a descriptor the mailbox is not yielded up
        if box is None:
            self.backlog.append(payload)
            return False
        desc = self.arena.map(len(payload))  # clean: near miss, on_air keeps it, handle_tx_irq unmaps it
        if desc is None:
            self.errors += 1
            return False
        desc.memory[: len(payload)] = payload
        self.on_air[box] = (desc, done)
        self.regs.write("TXREQ", 1 << box)
        return True

    def transmit_now(self, ident: int, payload: bytes) -> bool:
        with self.irq.masked():  # clean: context manager
            box = self.mailboxes.claim()  # clean: yielded up on each way
            if box is None:
                return False
            self.regs.write("MB%d" % box, payload)
            sent = self.regs.poll("TXOK", 1 << box)
            self.mailboxes.yield_up(box)
        return bool(sent)

    def handle_tx_irq(self) -> None:
        status = self.regs.read("TXSTAT")
        for box in list(self.on_air):
            if not status & (1 << box):
                continue
            desc, done = self.on_air.pop(box)
            self.arena.unmap(desc)
            self.mailboxes.yield_up(box)
            if done is not None:
                done(True)

    def abort_all(self) -> int:
        count = 0
        while self.on_air:
            box, (desc, done) = self.on_air.popitem()
            self.regs.write("TXABT", 1 << box)
            self.arena.unmap(desc)
            self.mailboxes.yield_up(box)
            count += 1
            if done is not None:
                done(False)
        return count

    def set_bitrate(self, bitrate: int) -> bool:
        self.irq.mask()  # leak: the unsupported rate returns with interrupts masked
        divider, rest = divmod(80_000_000, bitrate * 16)
        if rest:
            log.error("no divider for %d bit/s", bitrate)
            return False
        self.regs.write("BTR", divider)
        self.irq.unmask()
        return True

    def reset(self) -> None:
        self.irq.mask()  # clean: unmasked on both ways
        if self.regs.read("STATUS") & BUS_OFF:
            self.regs.write("CTRL", 1)
            self.irq.unmask()
            self.abort_all()
            return
        self.regs.write("CTRL", 2)
        self.irq.unmask()

    def bounce(self, size: int) -> Optional[DmaDescriptor]:
        """Scratch descriptor for unaligned reads, mapped once and kept till stop()."""
        if self._bounce is None:
            self._bounce = self.arena.map(size)  # clean: near miss, only mapped when absent, stop() unmaps it
        return self._bounce

    def stop(self) -> None:
        self.abort_all()
        if self._bounce is not None:
            self.arena.unmap(self._bounce)
            self._bounce = None


class Receiver:
    """Receive ring: one descriptor armed in hardware, a list of filled ones for the reader."""

    def __init__(self, controller: CanController, size: int) -> None:
        self.controller = controller
        self.arena = controller.arena
        self.size = size
        self.armed: Optional[DmaDescriptor] = None
        self.filled: deque[DmaDescriptor] = deque(maxlen=8)
        self.overruns = 0

    def arm(self) -> bool:
        if self.armed is None:
            self.armed = self.arena.map(self.size)  # leak: filled has a maxlen and drops the oldest unmapped
        return self.armed is not None

    def handle_rx_irq(self) -> None:
        if self.armed is not None:
            self.filled.append(self.armed)
            self.armed = None
        if not self.arm():
            self.overruns += 1

    def read(self) -> Optional[bytes]:
        if not self.filled:
            return None
        desc = self.filled.popleft()
        data = bytes(desc.memory[: desc.length])
        self.arena.unmap(desc)
        return data

    def stop(self) -> None:
        while self.filled:
            self.arena.unmap(self.filled.popleft())
        if self.armed is not None:
            self.arena.unmap(self.armed)
            self.armed = None


def send_segmented(ctl: CanController, ident: int, payload: bytes, chunk: int = 8) -> int:
    sent = 0
    for offset in range(0, len(payload), chunk):
        desc = ctl.arena.map(chunk)  # leak: a failed segment breaks off with its descriptor mapped
        if desc is None:
            break
        part = payload[offset : offset + chunk]
        struct.pack_into("<BB", desc.memory, 0, ident & 0xFF, len(part))
        if not ctl.regs.kick(desc.slot, desc.length):
            log.warning("segment %d refused", offset // chunk)
            break
        sent += len(part)
        ctl.arena.unmap(desc)
    return sent


def self_test(ctl: CanController) -> dict[int, bool]:
    """Walk over all mailboxes in loop-back mode."""
    result: dict[int, bool] = {}
    taken: list[int] = []
    while (box := ctl.mailboxes.claim()) is not None:  # clean: near miss, collected and yielded up below
        taken.append(box)
        result[box] = bool(ctl.regs.poll("LOOP", 1 << box))
    for box in taken:
        ctl.mailboxes.yield_up(box)
    return result


def reserve_boxes(ctl: CanController, wanted: int) -> set[int]:
    """Mailboxes kept away from the driver, for the bootloader; counts the ones obtained."""
    kept: set[int] = set()
    for _ in range(wanted):
        box = ctl.mailboxes.claim()  # clean: handed to the caller in the set
        if box is None:
            break
        kept.add(box)
    return kept


def flash_over_can(ctl: CanController, image: bytes) -> bool:
    boxes = reserve_boxes(ctl, 4)  # leak: yielded up only when all four were had
    if len(boxes) < 4:
        log.error("only %d mailboxes free", len(boxes))
        return False
    for number, box in enumerate(sorted(boxes)):
        ctl.regs.write("MB%d" % box, image[number::4])
    for box in boxes:
        ctl.mailboxes.yield_up(box)
    return True
