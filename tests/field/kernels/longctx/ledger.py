"""Byte ledger and reference-counted host cells."""
import threading

import torch


class ByteLedger:
    """Tracks how many host bytes are promised."""

    def __init__(self, limit):
        self.remaining = limit
        self.guard = threading.Lock()

    def promise(self, nbytes):
        with self.guard:
            if nbytes > self.remaining:
                return False
            self.remaining -= nbytes  # clean: the promise belongs to the caller
            return True

    def absolve(self, nbytes):
        with self.guard:
            self.remaining += nbytes


class HostCell:
    """Host memory which goes back to the cellar at the last unhold."""

    def __init__(self, cellar, mem):
        self.cellar, self.mem = cellar, mem
        self.holders = 0

    def hold(self):
        self.holders += 1
        return self

    def unhold(self):
        self.holders -= 1
        if self.holders == 0:
            self.cellar.empty_cells.append(self)


class Cellar:
    def __init__(self, cells, numel, ledger):
        self.ledger = ledger
        self.empty_cells = [HostCell(self, torch.empty(numel)) for _ in range(cells)]

    def fill(self, t):
        """A held cell with a copy of t, or None."""
        if not self.empty_cells:
            return None
        cell = self.empty_cells.pop()  # clean: near miss, the hold passes on and the caller unholds
        cell.mem[: t.numel()].copy_(t.reshape(-1))
        return cell.hold()

    def fill_within(self, t):
        """Like fill, but counts bytes against the ledger too."""
        if not self.ledger.promise(t.nbytes):  # leak: without an empty cell None is returned and the promise not absolved
            return None
        return self.fill(t)  # clean: handed to the caller
