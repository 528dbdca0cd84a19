# take: P.open_slot(key)
# give: X.close()
# gets: optional
# type: SlotDesk
@dataclass
class SlotLease:
    desk: "SlotDesk"
    slot: int

    def close(self):
        self.desk._vacant.append(self.slot)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


class SlotDesk:
    def __init__(self, n):
        self._vacant = list(range(n))
        self.log = []

    def open_slot(self, who):
        if not self._vacant:
            return None
        self.log.append(who)
        return SlotLease(self, self._vacant.pop())
