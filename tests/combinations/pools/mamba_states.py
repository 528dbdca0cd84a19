# take: P.attach(key)
# give: P.detach(key)
# gets: value
# type: MambaStateSlots
class MambaStateSlots:
    """Recurrent-state rows by request id; attaching twice gives the same row."""

    def __init__(self, max_batch):
        self.free_state_indices = list(range(max_batch))
        self.row_of = {}
        self.holders = {}

    def attach(self, req_id):
        if req_id not in self.row_of:
            if not self.free_state_indices:
                raise RuntimeError("no mamba state rows left")
            self.row_of[req_id] = self.free_state_indices.pop()
            self.holders[req_id] = 0
        self.holders[req_id] += 1
        return self.row_of[req_id]

    def detach(self, req_id):
        self.holders[req_id] -= 1
        if not self.holders[req_id]:
            del self.holders[req_id]
            self.free_state_indices.append(self.row_of.pop(req_id))
