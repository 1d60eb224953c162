"""configs/grpo.yaml and configs/dapo.yaml: their losses are those of the papers, and they train."""

import math
import random
from statistics import fmean, pstdev

import pytest
import torch

from tests.paths import ROOT
from tests.trainer.rollouts import TEMPERATURE, completion, model, train_batch
from tramontane import train
from tramontane.config import ObjectiveConfig, TrainerConfig, load_config
from tramontane.errors import InputError
from tramontane.trainer.trainer import Trainer
from tramontane.types import Problem
from tramontane.verifier.reward import grade

LENGTHS = [[3, 9, 27], [12, 1, 5]]  # two groups of three completions
REWARDS = [[1.0, 0.1, 0.0], [0.0, 0.5, 1.0]]


def preset(name, **overrides):
    given = {"model": "tiny", "data.train": "playground:"} | overrides
    return load_config(ROOT / f"configs/{name}.yaml", [f"{k}={v}" for k, v in given.items()])


def sampled(policy):
    """The groups, with log-probs near the policy's: ratios lie within and beyond the clip range."""
    rng = random.Random(0)
    groups = []
    for lengths, rewards in zip(LENGTHS, REWARDS, strict=True):
        prompt = [rng.randrange(1, 61) for _ in range(4)]
        group = [
            completion(rng, prompt, n, reward=r) for n, r in zip(lengths, rewards, strict=True)
        ]
        for member in group:
            for place, logprob in enumerate(logprobs(policy, member).tolist()):
                member.logprobs[place] = logprob + rng.uniform(-0.5, 0.5)
        groups.append(group)
    return groups


@torch.no_grad()
def logprobs(policy, sequence):
    """log π of the sampled tokens, by a plain forward pass: [T]."""
    ids = torch.tensor([[*sequence.prompt_ids, *sequence.token_ids]])
    logits = policy(ids).logits[0, len(sequence.prompt_ids) - 1 : -1].double() / TEMPERATURE
    return logits.log_softmax(-1).gather(1, ids[0, len(sequence.prompt_ids) :, None])[:, 0]


def grpo(policy, reference, groups, eps=0.2, beta=0.04):
    """Equations 3 and 4 of arXiv 2402.03300, to be maximized."""
    total = 0.0
    for group in groups:
        rewards = [s.reward for s in group]
        of_group = 0.0
        for s in group:
            advantage = (s.reward - fmean(rewards)) / pstdev(rewards)
            new, ref = logprobs(policy, s), logprobs(reference, s)
            of_sequence = 0.0
            for t in range(len(s.token_ids)):
                ratio = math.exp(new[t] - s.logprobs[t])
                clipped = min(max(ratio, 1 - eps), 1 + eps)
                away = math.exp(ref[t] - new[t])
                divergence = away - math.log(away) - 1
                of_sequence += min(ratio * advantage, clipped * advantage) - beta * divergence
            of_group += of_sequence / len(s.token_ids)
        total += of_group / len(group)
    return total / len(groups)


def dapo(policy, reference, groups, low=0.2, high=0.28):
    """Equation 8 of arXiv 2503.14476, to be maximized."""
    total = 0.0
    for group in groups:
        rewards = [s.reward for s in group]
        of_group = 0.0
        for s in group:
            advantage = (s.reward - fmean(rewards)) / pstdev(rewards)
            for new, old in zip(logprobs(policy, s).tolist(), s.logprobs, strict=True):
                ratio = math.exp(new - old)
                clipped = min(max(ratio, 1 - low), 1 + high)
                of_group += min(ratio * advantage, clipped * advantage)
        total += of_group / sum(len(s.token_ids) for s in group)
    return total / len(groups)


@pytest.mark.parametrize(("name", "formula"), [("grpo", grpo), ("dapo", dapo)])
def test_the_loss_of_a_preset_is_that_of_its_paper(name, formula):
    objective = preset(name).trainer.objective
    t = Trainer(model(), TrainerConfig(objective=objective, microbatch_tokens=64), updates=1)
    torch.manual_seed(1)
    with torch.no_grad():  # away from the reference, which stays as it was
        for parameter in t.model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    groups = sampled(t.model)
    expected = -formula(t.model, model(), groups)
    metrics = t.step(train_batch(0, groups))
    assert metrics["clip_fraction_low"] > 0 and metrics["clip_fraction_high"] > 0
    assert metrics["loss"] == pytest.approx(expected, rel=1e-4)
    assert ("kl_reference" in metrics) == (name == "grpo")


def test_dapos_reward_gives_the_papers_advantages():
    """±1 for the answer, and the penalty of its equation 13 for the length."""
    config = preset("dapo", **{"pipeline.l_max": 100, "pipeline.l_cache": 20})
    right, wrong = (f"<think>a</think>\\boxed{{{n}}}" for n in (42, 41))
    answers = [(right, 70), (right, 95), (wrong, 85), (wrong, 100), (right, 80)]
    problem = Problem("p", "math", "What is 6 times 7?", "42")
    ours, papers = [], []
    for text, length in answers:
        papers.append((1 if text == right else -1) + min(0.0, (80 - length) / 20))
        sizes = config.pipeline.l_max, config.pipeline.l_cache
        ours.append(grade(problem, text, length, config.verifier, *sizes).reward)

    def advantages(rewards):
        return [(r - fmean(rewards)) / pstdev(rewards) for r in rewards]

    assert advantages(ours) == pytest.approx(advantages(papers))


def test_grpos_reward_is_that_of_format_and_answer():
    config, problem = preset("grpo"), Problem("p", "math", "What is 6 times 7?", "42")
    texts = ["<think>a</think>\\boxed{42}", "<think>a</think>\\boxed{41}", "42"]
    rewards = [grade(problem, text, 1024, config.verifier, 1024, 0).reward for text in texts]
    assert rewards == pytest.approx([1.0, 0.1, 0.0])


@pytest.mark.parametrize(
    ("name", "title"),
    [
        *(("grpo", "GRPO"), ("GRPO", "GRPO"), ("dapo", "DAPO"), ("ppo", "PPO's clipped loss")),
        *(("dr_grpo", "Dr. GRPO"), ("Dr. GRPO", "Dr. GRPO"), ("dr-grpo", "Dr. GRPO")),
        *(("rloo", "RLOO"), ("reinforce", "REINFORCE"), ("reinforce++", "REINFORCE++")),
    ],
)
def test_the_name_of_a_known_algorithm_is_answered_with_keys_that_are_valid(name, title, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(f"trainer: {{objective: {{name: '{name}'}}}}")
    with pytest.raises(InputError, match="trainer.objective.name: ") as caught:
        load_config(file)
    message = str(caught.value)
    assert f"objective.name: {title}" in message
    keys = message.partition("these keys: ")[2].partition("}}")[0] + "}}"
    file.write_text(f"trainer: {{objective: {keys}}}")
    given = load_config(file).trainer.objective
    if (known := ROOT / f"configs/{name.lower()}.yaml").exists():
        assert given == load_config(known, ["model=any", "data.train=any"]).trainer.objective
    assert given.name == "magistral"
    assert given != ObjectiveConfig()


@pytest.mark.parametrize("name", ["icepop", "IcePop", "dppo", "TIS", "mis", "overlong"])
def test_the_name_of_a_correction_is_answered_with_keys_that_are_valid(name, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(f"trainer: {{objective: {name}}}")
    with pytest.raises(InputError, match=f"objective.name: {name} is a correction") as caught:
        load_config(file)
    keys = str(caught.value).partition("trainer.objective: ")[2].partition(". See")[0]
    file.write_text(f"trainer: {{objective: {keys}}}")
    assert load_config(file).trainer.objective != ObjectiveConfig()


def test_a_module_of_ones_own_may_have_such_a_name(tmp_path, monkeypatch):
    lines = ["from tramontane.config import ObjectiveOptions as Options", "advantages = loss = id"]
    (tmp_path / "rloo.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert ObjectiveConfig(name="rloo").name == "rloo"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_a_preset_trains_the_tiny_base(name, tmp_path):
    small = {
        "run_dir": tmp_path / "run",
        "data.playground": "{levels: [1, 1], languages: [en]}",
        "pipeline.updates": 1,
        "pipeline.group_size": 8,
        "pipeline.n_batch": 16,
        "pipeline.n_async": 32,
        "pipeline.l_max": 64,
        "pipeline.l_cache": 16 if name == "dapo" else 0,
        "verifier.workers": 1,
    }
    small |= {"pipeline.n_minibatch": 8} if name == "dapo" else {}
    rows = []
    done = train(preset(name, **small), quiet=True, report=False, on_update=rows.append)
    assert done.finished and done.updates == 1
    assert rows[0]["grad_norm"] > 0
    assert ("kl_reference" in rows[0]) == (name == "grpo")
