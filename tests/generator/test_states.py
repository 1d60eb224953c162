"""Models that carry state in the slot engine: random lives of sequences, against plain forwards."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
import torch
from transformers import Cache, DynamicCache

from tests.generator.slot_models import make_prompt, plain_logprobs
from tests.generator.test_parking import going_on
from tests.hybrids import EOS, FAMILIES, make_hybrid
from tramontane.errors import InputError
from tramontane.generator import cache
from tramontane.generator.engine import SlotEngine
from tramontane.generator.forward import examine_model
from tramontane.types import Completion, SamplingParams

MAX_LEN = 120


def make_versions(family: str, count: int = 3):
    return [make_hybrid(family, seed).requires_grad_(False) for seed in range(count)]


def largest_error(versions, completions) -> float:
    """Against plain forwards under the weights that sampled each token; inserted tokens aside."""
    by_version = [plain_logprobs(model, completions) for model in versions]
    errors = []
    for i, completion in enumerate(completions):
        expected = torch.stack([logprobs[i] for logprobs in by_version])
        sampled = torch.tensor(completion.versions)
        drawn = sampled >= 0
        expected = expected.gather(0, sampled.clamp(min=0)[None].long())[0]
        found = torch.tensor(completion.logprobs)
        errors.append((found - expected)[drawn].abs())
    return float(torch.cat(errors).max())


class Life:
    """Groups that come, are cancelled, park, go on and fork, while weights change."""

    def __init__(self, versions, seed: int, **options) -> None:
        self.rng, self.versions = random.Random(seed), versions
        self.engine = SlotEngine(
            copy.deepcopy(self.versions[0]), 6, MAX_LEN, [EOS], prefill_tokens=64, **options
        )
        self.group, self.ended, self.requests = 0, [], {}
        self.all: list[Completion] = []  # that ended, whatever came of them

    def arrive(self) -> None:
        prompt, self.group = make_prompt(self.rng, self.rng.randint(1, 30)), self.group + 1
        most = self.rng.randint(2, 20)
        self._submit(
            [
                Completion.requested(
                    self.group, i, prompt, self.rng.getrandbits(60), SamplingParams(most)
                )
                for i in range(self.rng.randint(1, 4))
            ]
        )

    def _submit(self, requests) -> None:
        requests = [replace(r, keep_kv=True) for r in requests]
        self.requests |= {(r.group, r.index): r for r in requests}
        self.engine.submit(requests)

    def step(self) -> None:
        for _ in range(self.rng.randint(1, 6)):
            for completion in self.engine.step():
                self.all.append(completion)
                self.ended.append(completion)

    def finish(self) -> None:
        """Step until nothing is unfinished; each token is that of a plain forward."""
        while self.engine.unfinished:
            self.step()
        assert largest_error(self.versions[: self.engine.version + 1], self.all) < 1e-4

    def resume(self) -> None:
        """A conversation continues behind its environment's answer, or is forked."""
        if not self.ended:
            return
        completion = self.ended.pop(self.rng.randrange(len(self.ended)))
        request = self.requests[completion.group, completion.index]
        if len(completion.prompt_ids) + len(completion.token_ids) > MAX_LEN - 15:
            return
        following = going_on(request, completion, make_prompt(self.rng, self.rng.randint(0, 7)))
        forks = [replace(following, index=100 * len(self.requests), seed=self.rng.getrandbits(60))]
        self._submit([following, *(forks if self.rng.random() < 0.3 else [])])

    def cancel(self) -> None:
        group = self.rng.randint(1, self.group)
        self.engine.cancel(group)
        self.ended = [c for c in self.ended if c.group != group]

    def update(self) -> None:
        if self.engine.version + 1 < len(self.versions):
            version = self.engine.version + 1
            self.engine.model.load_state_dict(self.versions[version].state_dict())
            self.engine.version = version
            self.engine.recompute()

    def whole(self) -> None:
        """All of it, at random."""
        acts = [self.arrive, self.arrive, self.step, self.step, self.step]
        self.arrive()
        for act in range(24):
            self.rng.choice([*acts, self.resume, self.resume, self.cancel])()
            if act % 8 == 7:
                self.arrive()
                self.step()
                self.update()
        self.finish()
        stats = self.engine.stats
        assert stats.generated_tokens > 60
        assert min(stats.parked_tokens, stats.recomputed_tokens) > 0


@pytest.mark.parametrize(
    ("family", "sharing_slots"), [*((f, 1) for f in FAMILIES), ("qwen3_5_text", 99), ("jamba", 99)]
)
def test_every_token_of_a_life_is_that_of_a_plain_forward(family, sharing_slots, monkeypatch):
    monkeypatch.setattr(cache, "SHARING_SLOTS", sharing_slots)
    Life(make_versions(family), seed=4).whole()


def test_parked_states_are_used_and_group_members_read_their_prompt_once():
    life = Life(make_versions("qwen3_5_text"), seed=1)
    prompt = make_prompt(life.rng, 20)
    life._submit([Completion.requested(1, i, prompt, i, SamplingParams(5)) for i in range(3)])
    life.finish()
    assert life.engine.stats.prefill_tokens == 19
    for _ in range(3):
        life.resume()
    life.finish()
    assert life.engine.stats.parked_tokens >= 3 * 20


def test_states_count_as_memory():
    net = make_hybrid("qwen3_5_text")
    free = SlotEngine(copy.deepcopy(net), 6, MAX_LEN)
    layout = free._decoder.layout
    everything = free._decoder.size_within(6, MAX_LEN, None).positions * layout.token_bytes
    assert everything > 12 * layout.state_bytes
    tight = SlotEngine(copy.deepcopy(net), 6, MAX_LEN, kv_bytes=everything // 2)
    assert 1 <= tight.slots < 6


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "granitemoehybrid"])
def test_kept_states_are_those_of_earlier_weights(family):
    """With kv_cache: keep, a step under new weights reads the states that older weights made."""
    check_kept(*make_versions(family, 2))


def check_kept(old, new, **options) -> None:
    """Steps after an update, against transformers' own cache, which holds what `old` put there."""
    engine = SlotEngine(copy.deepcopy(old), 2, MAX_LEN, **options)
    prompt = make_prompt(random.Random(3), 12)
    engine.submit([Completion.requested(0, 0, prompt, 1, SamplingParams(12))])
    for _ in range(6):
        engine.step()
    engine.model.load_state_dict(new.state_dict())
    engine.version = 1
    (completion,) = [c for _ in range(6) for c in engine.step()]
    past = DynamicCache(config=old.config)
    old(input_ids=torch.tensor([prompt[:-1]]), past_key_values=past, use_cache=True)
    tokens = [prompt[-1], *completion.token_ids]
    for t, (version, logprob) in enumerate(
        zip(completion.versions, completion.logprobs, strict=True)
    ):
        net = (old, new)[version]
        logits = net(
            input_ids=torch.tensor([[tokens[t]]]),
            position_ids=torch.tensor([[len(prompt) - 1 + t]]),
            past_key_values=past,
            use_cache=True,
        ).logits[0, -1]
        assert abs(float(logits.log_softmax(-1)[tokens[t + 1]]) - logprob) < 1e-4
    assert {*completion.versions} == {0, 1}


def test_a_lone_prompt_token_starts_from_no_state():
    life = Life(make_versions("lfm2"), seed=0)
    life._submit([Completion.requested(1, i, [5], i, SamplingParams(6)) for i in range(2)])
    life.finish()
    assert len(life.ended) == 2


def test_a_transformers_without_methods_for_states_is_named(monkeypatch):
    monkeypatch.delattr(Cache, "get_conv_state")  # as in 5.20, the last one for Python 3.10
    with pytest.raises(InputError, match=r"transformers 5\.21 or newer"):
        examine_model(make_hybrid("lfm2"), 32)
