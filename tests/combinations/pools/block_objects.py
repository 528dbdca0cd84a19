# take: P.new_block()
# give: P.unref(X)
# gets: optional
class Block:
    def __init__(self, index):
        self.index = index
        self.refs = 0


class Pool:
    def __init__(self, count):
        self._free = [Block(i) for i in range(count)]

    def new_block(self):
        if not self._free:
            return None
        block = self._free.pop()
        block.refs = 1
        return block

    def unref(self, block):
        block.refs -= 1
        if block.refs == 0:
            self._free.append(block)
