# take: P.get_block()
# give: P.put_block(X)
# gets: optional
# type: TwoTierBlocks
class TieredBlock:
    def __init__(self, tier, num):
        self.tier = tier
        self.num = num

    def __repr__(self):
        return f"{self.tier}:{self.num}"


class TwoTierBlocks:
    """Device blocks while they last, then host blocks."""

    def __init__(self, n_device, n_host):
        self._device = [TieredBlock("device", i) for i in range(n_device)]
        self._host = [TieredBlock("host", i) for i in range(n_host)]

    def get_block(self):
        for stock in (self._device, self._host):
            if stock:
                return stock.pop()
        return None

    def put_block(self, blk):
        stock = self._device if blk.tier == "device" else self._host
        if blk in stock:
            raise ValueError(f"{blk} put twice")
        stock.append(blk)
