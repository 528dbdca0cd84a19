# take: P.seat()
# give: P.unseat(X)
# gets: optional
# type: DecodeSeats
class DecodeSeats:
    """Decode batch rows kept as one Python int; bit set means seat is vacant."""

    def __init__(self, rows):
        self._rows = rows
        self._vacant = (1 << rows) - 1

    def __len__(self):
        return self._rows - self._vacant.bit_count()

    def seat(self):
        if not self._vacant:
            return None
        lowest = self._vacant & -self._vacant
        self._vacant ^= lowest
        return lowest.bit_length() - 1

    def unseat(self, row):
        bit = 1 << row
        if self._vacant & bit:
            raise ValueError(f"row {row} is not seated")
        self._vacant |= bit
