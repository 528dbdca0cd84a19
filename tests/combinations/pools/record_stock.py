# take: P.pull(key)
# give: P.push_back(key, X)
# gets: optional
# type: TierStore
@dataclass
class Tier:
    capacity: int
    vacant: list
    served: int = 0


class TierStore:
    def __init__(self, tiers):
        self.tiers = {name: Tier(n, list(range(n))) for name, n in tiers.items()}

    def pull(self, name):
        tier = self.tiers[name]
        if not tier.vacant:
            return None
        tier.served += 1
        return tier.vacant.pop()

    def push_back(self, name, slot):
        tier = self.tiers[name]
        assert slot < tier.capacity
        tier.vacant.append(slot)
