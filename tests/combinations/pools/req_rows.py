# take: P.assign(n)
# give: P.vacate(X)
# gets: optional
# type: ReqToTokenTable
import torch


class ReqToTokenTable:
    def __init__(self, size, max_ctx, device="cpu"):
        self.size = size
        self.table = torch.zeros((size, max_ctx), dtype=torch.int32, device=device)
        self.free_rows = list(range(size))

    def write(self, where, values):
        self.table[where] = values

    def available_size(self):
        return len(self.free_rows)

    def assign(self, need_size=1):
        if need_size > len(self.free_rows):
            return None
        rows = self.free_rows[:need_size]
        self.free_rows = self.free_rows[need_size:]
        return rows

    def vacate(self, rows):
        if isinstance(rows, int):
            self.free_rows.append(rows)
        else:
            self.free_rows.extend(rows)

    def clear(self):
        self.free_rows = list(range(self.size))
