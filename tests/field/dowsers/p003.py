"""Rows of a state-space cache; a torch bool tensor says which rows are taken."""
import torch


class StateRows:
    def __init__(self, rows, width, device="cpu"):
        self.data = torch.zeros(rows, width, device=device)
        self.busy = torch.zeros(rows, dtype=torch.bool)

    def take_row(self):
        idle = torch.nonzero(~self.busy)
        if idle.numel() == 0:
            return -1
        row = int(idle[0, 0])
        self.busy[row] = True
        self.data[row].zero_()
        return row

    def put_row(self, row):
        self.busy[row] = False


class MambaRunner:
    def __init__(self, rows: StateRows, net):
        self.rows = rows
        self.net = net
        self.row_of = {}

    def begin(self, seq_id, prompt):
        row = self.rows.take_row()  # clean: kept in row_of, end() puts it back
        if row < 0:
            return False
        self.row_of[seq_id] = row
        self.net.scan(prompt, self.rows.data[row])
        return True

    def end(self, seq_id):
        self.rows.put_row(self.row_of.pop(seq_id))

    def perplexity(self, tokens):
        row = self.rows.take_row()  # leak: a short input returns without put_row
        if row < 0:
            return None
        if len(tokens) < 2:
            return 0.0
        loss = self.net.loss(tokens, self.rows.data[row])
        self.rows.put_row(row)
        return loss

    def evaluate(self, batch):
        scores = []
        for tokens in batch:
            row = self.rows.take_row()  # leak: continue on a NaN keeps the row
            if row < 0:
                break
            loss = self.net.loss(tokens, self.rows.data[row])
            if loss != loss:
                continue
            scores.append(loss)
            self.rows.put_row(row)
        return scores

    def dry_run(self, tokens):
        row = self.rows.take_row()  # clean: put back in finally
        if row == -1:
            return
        try:
            self.net.scan(tokens, self.rows.data[row])
        finally:
            self.rows.put_row(row)
