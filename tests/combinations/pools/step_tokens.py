# take: P.admit(n)
# give: P.retract(n)
# gets: answer
# type: StepAllowance
class StepAllowance:
    """max_num_batched_tokens for one scheduler step"""

    def __init__(self, ceiling):
        self.ceiling = ceiling
        self.spent = 0
        self.high_water = 0

    def admit(self, ntok):
        after = self.spent + ntok
        if after > self.ceiling:
            return False
        self.spent = after
        if after > self.high_water:
            self.high_water = after
        return True

    def retract(self, ntok):
        if ntok > self.spent:
            raise ValueError("retracting more tokens than were admitted")
        self.spent -= ntok
