"""Detokenised results travel from engine to API process through shared-memory cells."""
from collections import OrderedDict
from typing import Iterator, Optional


class Cell:
    __slots__ = ("view", "used", "next")

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.used = 0
        self.next: Optional["Cell"] = None


class CellChain:
    """Vacant cells in a singly linked list."""

    def __init__(self, shm: memoryview, cell_bytes: int) -> None:
        self.cell_bytes = cell_bytes
        self._first: Optional[Cell] = None
        for start in range(0, len(shm), cell_bytes):
            self.relink(Cell(shm[start:start + cell_bytes]))

    def unlink(self) -> Optional[Cell]:
        cell = self._first
        if cell is not None:
            self._first = cell.next
            cell.next, cell.used = None, 0
        return cell

    def relink(self, cell: Cell) -> None:
        cell.next = self._first
        self._first = cell

    def unlink_chain(self, nbytes: int) -> Optional[Cell]:
        """Enough linked cells for nbytes, or None."""
        head: Optional[Cell] = None
        while nbytes > 0:
            cell = self.unlink()  # clean: near miss, a chain cut short is relinked
            if cell is None:
                self.relink_chain(head)
                return None
            cell.next, head = head, cell
            nbytes -= self.cell_bytes
        return head

    def relink_chain(self, head: Optional[Cell]) -> None:
        while head is not None:
            head, cell = head.next, head
            self.relink(cell)


class Window:
    """Unacknowledged-message allowance of one client."""

    def __init__(self, size: int) -> None:
        self.room = size

    def charge(self) -> bool:
        if self.room == 0:
            return False
        self.room -= 1
        return True

    def acknowledge(self) -> None:
        self.room += 1


class ResultWriter:
    def __init__(self, chain: CellChain, window: Window, wire) -> None:
        self.chain = chain
        self.window = window
        self.wire = wire
        self.sent: OrderedDict[int, Cell] = OrderedDict()
        self.seqno = 0

    def send(self, text: bytes) -> bool:
        if not self.window.charge():  # clean: near miss, acknowledged without cell, else by on_ack
            return False
        cell = self.chain.unlink()  # clean: kept in sent until on_ack() or close()
        if cell is None:
            self.window.acknowledge()
            return False
        cell.used = len(text)
        cell.view[:cell.used] = text
        self.seqno += 1
        self.sent[self.seqno] = cell
        self.wire.post(self.seqno, cell.used)
        return True

    def send_final(self, text: bytes, reason: Optional[str]) -> bool:
        cell = self.chain.unlink()  # leak: an exhausted window returns with the cell unlinked
        if cell is None:
            return False
        if not self.window.charge():  # clean: on_ack() acknowledges
            return False
        cell.used = len(text)
        cell.view[:cell.used] = text
        self.seqno += 1
        self.sent[self.seqno] = cell
        self.wire.post_final(self.seqno, reason)
        return True

    def send_logprobs(self, blob: bytes) -> bool:
        head = self.chain.unlink_chain(len(blob))  # leak: only the head is relinked, not the chain
        if head is None:
            return False
        cell, start = head, 0
        while cell is not None:
            part = blob[start:start + self.chain.cell_bytes]
            cell.view[:len(part)] = part
            cell, start = cell.next, start + len(part)
        self.wire.post_sync(head)
        self.chain.relink(head)
        return True

    def encoded(self, pieces: list[bytes]) -> Iterator[Cell]:
        """Yield filled cells; each one is relinked when the consumer asks for the next."""
        for piece in pieces:
            cell = self.chain.unlink()  # clean: near miss, finally relinks even when closed early
            if cell is None:
                return
            try:
                cell.used = len(piece)
                cell.view[:cell.used] = piece
                yield cell
            finally:
                self.chain.relink(cell)

    def nonempty(self, pieces: list[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            cell = self.chain.unlink()  # leak: pieces that strip to nothing continue without relink
            if cell is None:
                return
            cell.view[:len(piece)] = piece
            body = bytes(cell.view[:len(piece)]).strip()
            if not body:
                continue
            self.chain.relink(cell)
            yield body

    def render(self, text: bytes, into: Optional[Cell] = None) -> int:
        """Render into a given cell or a temporary one."""
        owned = into is None
        cell = self.chain.unlink() if owned else into  # clean: near miss, relinked exactly when owned
        if cell is None:
            return 0
        size = self.wire.render(text, cell.view)
        if owned:
            self.chain.relink(cell)
        return size

    def on_ack(self, upto: int) -> None:
        while self.sent and next(iter(self.sent)) <= upto:
            _, cell = self.sent.popitem(last=False)
            self.chain.relink(cell)
            self.window.acknowledge()

    def close(self) -> None:
        self.on_ack(self.seqno)
