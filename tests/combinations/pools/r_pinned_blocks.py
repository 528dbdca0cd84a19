# take: P.unhook()
# give: P.hook(X)
# gets: value
# type: PinnedChain
import abc


class Block:
    __slots__ = ("mem", "nxt", "uses")

    def __init__(self, mem):
        self.mem, self.nxt, self.uses = mem, None, 0


class Chain(abc.ABC):
    def __init__(self):
        self._first = None
        self._made = 0

    @abc.abstractmethod
    def _forge(self):
        """Memory for one more block."""

    def unhook(self):
        blk = self._first
        if blk is None:
            blk = Block(self._forge())
            self._made += 1
        else:
            self._first = blk.nxt
            blk.nxt = None
        blk.uses += 1
        return blk

    def hook(self, blk):
        blk.nxt = self._first
        self._first = blk


class PinnedChain(Chain):
    def __init__(self, nbytes):
        super().__init__()
        self.nbytes = nbytes

    def _forge(self):
        return memoryview(bytearray(self.nbytes))
