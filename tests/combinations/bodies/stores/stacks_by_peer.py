# TAKE: X = self._stacks[peer].pop()
# PUT: self._stacks[peer].append(X)
# EMPTY: not self._stacks[peer]
# COUNT: len(self._stacks[peer])
# BAD: not X.ping()
class Channel:
    def __init__(self, peer, index):
        self.peer = peer
        self.index = index

    def ping(self):
        return self.index % 7 != 0


class ChannelBank:
    def __init__(self, peers, each):
        self._stacks = {peer: [Channel(peer, i) for i in range(each)] for peer in peers}

    def lease(self, peer):
        stack = self._stacks[peer]
        return stack.pop() if stack else None

    def give_back(self, channel):
        self._stacks[channel.peer].append(channel)
