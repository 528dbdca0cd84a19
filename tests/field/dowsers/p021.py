"""Weight versions: readers hold an epoch open, old versions go when nobody reads them."""
import threading


class WeightEpochs:
    def __init__(self, weights):
        self._mu = threading.Lock()
        self._epoch = 0
        self._versions = {0: weights}
        self._readers = {0: 0}

    def enter(self):
        with self._mu:
            self._readers[self._epoch] += 1
            return self._epoch

    def leave(self, epoch):
        with self._mu:
            self._readers[epoch] -= 1
            if epoch != self._epoch and self._readers[epoch] == 0:
                del self._readers[epoch], self._versions[epoch]

    def publish(self, weights):
        with self._mu:
            old = self._epoch
            self._epoch += 1
            self._versions[self._epoch] = weights
            self._readers[self._epoch] = 0
            if self._readers[old] == 0:
                del self._readers[old], self._versions[old]

    def weights(self, epoch):
        return self._versions[epoch]


class RolloutActor:
    def __init__(self, epochs: WeightEpochs, env):
        self.epochs = epochs
        self.env = env

    def rollout(self, steps):
        epoch = self.epochs.enter()  # clean: finally
        try:
            w = self.epochs.weights(epoch)
            return [self.env.step(w) for _ in range(steps)]
        finally:
            self.epochs.leave(epoch)

    def act(self, obs):
        epoch = self.epochs.enter()  # leak: the terminal observation returns inside the epoch
        if obs.terminal:
            return self.env.reset()
        action = self.env.policy(self.epochs.weights(epoch), obs)
        self.epochs.leave(epoch)
        return action

    def begin_episode(self):
        self.epoch = self.epochs.enter()  # clean: end_episode() leaves it
        self.env.reset()

    def end_episode(self):
        self.epochs.leave(self.epoch)

    def lag(self, other):
        mine = self.epochs.enter()  # leak: an epoch opened only to read its number
        return other - mine
