# take: P.stash()
# give: X.drop()
# gets: value
# type: ActivationStash
class _Cell:
    def __init__(self, owner, stage):
        self._owner = owner
        self.stage = stage
        self.tensors = None
        self.held = False

    def drop(self):
        if not self.held:
            raise RuntimeError("activation cell dropped twice")
        self.tensors = None
        self.held = False
        self._owner._restock(self)


class ActivationStash:
    """1F1B needs at most pp_size - rank live microbatches per stage."""

    def __init__(self, pp_size, pp_rank):
        self._cells = [_Cell(self, pp_rank) for _ in range(pp_size - pp_rank)]

    def _restock(self, cell):
        self._cells.append(cell)

    def stash(self):
        if not self._cells:
            raise RuntimeError("more microbatches in flight than warmup allows")
        cell = self._cells.pop()
        cell.held = True
        return cell
