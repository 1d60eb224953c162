"""Reinforcement learning with verifiable rewards as one synchronous loop: sample, grade, train.

    python examples/rl_loop.py [--updates 10] [--prompts 16]

`tramontane train` runs the same three workers asynchronously. Here each waits for the others, so
that the whole method fits on a page: the tiny base model learns arithmetic on the playground.
"""

import argparse
from itertools import islice

from tramontane.batches import BatchSettings, TrainBatch, TrainSequence
from tramontane.config import GeneratorConfig, TrainerConfig, VerifierConfig
from tramontane.data import playground
from tramontane.data.prompts import PromptEncoder
from tramontane.generator import Generator
from tramontane.models.weights import LocalWeights
from tramontane.trainer import Trainer
from tramontane.types import Completion, SamplingParams
from tramontane.verifier.reward import grade

L_MAX, L_CACHE = 192, 64  # longest completion in tokens; the last L_CACHE of them cost reward


def answer(generator, problems, size, temperature, seed):
    """(completions, verdicts) of each problem, `size` of both."""
    params, encoder = SamplingParams(L_MAX, temperature), PromptEncoder(generator.tokenizer)
    groups = [[] for _ in problems]
    for number, prompt in enumerate(encoder.encode_all([p.problem for p in problems])):
        for i in range(size):
            drawn = (seed * 10_000 + number) * 1_000 + i
            generator.submit([Completion.requested(number, i, prompt, drawn, params)])
    while generator.pending():
        for completion in generator.step():
            groups[completion.group].append(completion)
    groups, config = [sorted(group, key=lambda c: c.index) for group in groups], VerifierConfig()
    return groups, [
        [grade(problem, c.text, len(c.token_ids), config, L_MAX, L_CACHE) for c in group]
        for problem, group in zip(problems, groups, strict=True)
    ]


def run(updates, prompts, held_out=64, group_size=16):
    """Train, and print a line per update; returns what was printed, by name."""
    config = TrainerConfig(learning_rate=3e-4, microbatch_tokens=2048)
    trainer = Trainer.load("tiny", config, updates)
    generator = Generator.load("tiny", GeneratorConfig(), slots=256, max_len=512)
    problems = playground.problems("train", 0, (1, 3), ("en",))
    tests = list(playground.problems("test", 0, (1, 3), ("en",), count=held_out))
    settings = BatchSettings("", temperature=1.0, l_max=L_MAX, n_minibatch=prompts * group_size)

    def passed():
        verdicts = [v for judged in answer(generator, tests, 4, 0.7, 0)[1] for v in judged]
        return sum(v.verdict == "right" for v in verdicts) / len(verdicts)

    printed = {"reward": [], "pass@1": [passed()]}
    for version in range(updates):
        kept = []  # a group whose rewards are all equal has no advantages: it teaches nothing
        while not kept:
            asked = list(islice(problems, prompts))
            groups, judged = answer(generator, asked, group_size, 1.0, seed=version)
            groups = [[*map(TrainSequence.of, *pair)] for pair in zip(groups, judged, strict=True)]
            rewards = [[round(v.reward, 9) for v in verdicts] for verdicts in judged]
            kept = [g for g, found in zip(groups, rewards, strict=True) if len({*found}) > 1]
        metrics = trainer.step(TrainBatch(version, kept, settings))
        generator.fetch(version + 1, trainer.publish(LocalWeights()))
        generator.swap(version + 1)
        printed["reward"].append(mean := sum(map(sum, rewards)) / (prompts * group_size))
        print(f"update {version + 1:2}: reward {mean:.3f}, entropy {metrics['entropy']:.3f}")
    printed["pass@1"].append(passed())
    print(f"pass@1 on {held_out} held-out problems: {printed['pass@1']}")
    return printed


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=16, help="problems an update")
    run(**vars(parser.parse_args()))
