# take: P.new_block()
# give: P.drop_block(X)
# gets: optional
import torch


class Pool:
    def __init__(self, blocks):
        self.refs = torch.zeros(blocks, dtype=torch.int32)

    def new_block(self):
        unused = torch.nonzero(self.refs == 0).flatten()
        if unused.numel() == 0:
            return None
        block = int(unused[0])
        self.refs[block] = 1
        return block

    def drop_block(self, block):
        self.refs[block] -= 1
