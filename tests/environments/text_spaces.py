"""An environment of Gymnasium with texts, for tests; registered when this is imported."""

import gymnasium
from gymnasium.spaces import Discrete, Text


class Echo(gymnasium.Env):
    """Repeats each text, whose length is its reward; `d` is the last that it takes."""

    closed = 0

    observation_space = Text(200, min_length=0, charset="".join(map(chr, range(32, 127))))
    action_space = Text(10, charset="abcd")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = options["lengths"]
        return f"Write {self.left} texts (seed {seed}).", {}

    def step(self, action):
        self.left -= 1
        return action if self.left else "", len(action), not self.left, action == "d", {}

    def close(self):
        Echo.closed += 1


class Silent(Echo):
    action_space = Discrete(2)


gymnasium.register("Echo-v0", Echo)
gymnasium.register("Silent-v0", Silent)
