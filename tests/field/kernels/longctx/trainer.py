"""Window loop for documents longer than device memory."""
import torch

from .offload import LargeOnly


class WindowTrainer:
    def __init__(self, model, opt, cellar, window, use_ledger=False):
        self.model, self.opt = model, opt
        self.cellar, self.window = cellar, window
        self.use_ledger = use_ledger
        self.manager = LargeOnly(cellar, window)
        self.on_done = []

    def train_document(self, doc):
        state = None
        for i, at in enumerate(range(0, len(doc), self.window)):
            loss, state = self.model(doc[at : at + self.window], state)
            loss.backward()
            state = state.detach()
            if not self.manager.put_away(i, state):  # clean: near miss, whatever was kept is unheld by the flush after the loop
                continue
        self.opt.step()
        self.opt.zero_grad()
        self.manager.flush()

    def _room(self, nbytes):
        if self.use_ledger:
            return self.cellar.ledger.promise(nbytes)  # clean: handed to the caller, who settles it with _room_done
        return True

    def _room_done(self, nbytes):
        if self.use_ledger:
            self.cellar.ledger.absolve(nbytes)

    def evaluate(self, doc):
        if not self._room(doc.nbytes):  # clean: near miss, _room_done tests the same unchanging flag
            return None
        with torch.no_grad():
            loss, _ = self.model(doc, None)
        self._room_done(doc.nbytes)
        return float(loss)

    def evaluate_short(self, doc):
        if not self._room(doc.nbytes):  # leak: a long document returns without _room_done
            return None
        if len(doc) > self.window:
            return None
        with torch.no_grad():
            loss, _ = self.model(doc, None)
        self._room_done(doc.nbytes)
        return float(loss)

    def sample_state(self, t):
        cell = self.cellar.fill(t)  # leak: the mean is taken and the cell is never unheld
        if cell is None:
            return 0.0
        return float(cell.mem[: t.numel()].mean())

    def defer(self, t, use):
        cell = self.cellar.fill(t)  # clean: near miss, the queued callback unholds it when run_deferred calls it
        if cell is None:
            use(t)
            return

        def later():
            use(cell.mem[: t.numel()].clone())
            cell.unhold()

        self.on_done.append(later)

    def run_deferred(self):
        while self.on_done:
            self.on_done.pop(0)()
