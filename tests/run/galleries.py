"""Environments that show images, and a harness that does.

Imports no torch, so that the processes of workers start fast.
"""

import time
from pathlib import Path

from tests.environments.harnesses import ask
from tests.pictures import picture
from tramontane.data.images import as_text

LARGE, SMALL = picture(50, 40, seed=7), picture(28, 14, seed=8)  # other counts of tokens


class Gallery:
    """Shows a picture before the first turn and after each, of a size that the seed tells."""

    deterministic = True

    def start(self, problem, seed):
        self.seed, self.turns = seed, 0
        said = {"type": "text", "text": problem.problem}
        return [{"role": "user", "content": [self.shown(), said]}]

    def shown(self):
        return picture(30 + 10 * (self.seed % 3), 30, seed=self.seed % 5 + self.turns)

    def step(self, message):
        self.turns += 1
        said = ["Now ", {"type": "image", "image": self.shown()}, "what?"]
        return [{"role": "user", "content": said}], None, self.turns == 4


class SlowGallery(Gallery):
    """Every third group waits in its second turn until the run's folder has a file `go`."""

    def start(self, problem, seed, config):
        self.go = Path(config.run_dir) / "go"
        self.waits = seed // 65_537 % 3 == 2  # a group's seed follows its number
        return super().start(problem, seed)

    def step(self, message):
        while self.waits and self.turns == 1 and not self.go.exists():
            time.sleep(0.05)
        return super().step(message)


class Painter:
    """A harness that asks about the row's image and two more, and then anew about the last."""

    def run(self, problem, base_url):
        chat = []
        for shown in (problem.images[0], as_text(LARGE), as_text(SMALL)):
            part = {"type": "image_url", "image_url": {"url": shown}}
            chat.append({"role": "user", "content": [part, {"type": "text", "text": "What?"}]})
            chat.append(ask(base_url, chat))
        ask(base_url, chat[-2:-1])
