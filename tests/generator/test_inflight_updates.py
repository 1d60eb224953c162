"""In-flight weight updates, token by token, against references built by hand with transformers'
DynamicCache (arXiv 2506.10910, section 3)."""

from __future__ import annotations

import threading
from itertools import groupby

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from tests.generator.slot_models import (
    EOS,
    FAMILIES,
    chosen,
    finish,
    make_model,
    make_requests,
    make_tokenizer,
    plain_logprobs,
    twin,
)
from tests.models.test_staging import WAIT_SECONDS, SlowWeights
from tramontane.config import GeneratorConfig
from tramontane.errors import InputError
from tramontane.generator import Generator, cache
from tramontane.types import Completion


@pytest.fixture(autouse=True, params=["prefixes shared", "prefixes copied"])
def layout(request, monkeypatch):
    """Both layouts of keys and values; the number of slots decides between them in use."""
    monkeypatch.setattr(cache, "SHARING_SLOTS", 1 if request.param == "prefixes shared" else 1000)


def make_generator(model: PreTrainedModel, slots: int = 8, **config) -> Generator:
    return Generator(
        twin(model), make_tokenizer(), GeneratorConfig(**config), slots=slots, max_len=100
    )


def logprobs_on_old_keys(
    models: list[PreTrainedModel], prefix_version: int, c: Completion
) -> torch.Tensor:
    """Each token's log-prob [T] under the model of its version, on keys and values that the model
    which first read the earlier tokens computed.

    `models[prefix_version]` reads the prompt without its last token; `models[c.versions[t]]` reads
    the token before the t-th generated one. Those in a row of one version are read together.
    """
    cache = DynamicCache()
    prefix = c.prompt_ids[:-1]
    with torch.no_grad():
        if prefix:
            models[prefix_version](torch.tensor([prefix]), past_key_values=cache)
        out, read = [], torch.tensor([[c.prompt_ids[-1], *c.token_ids[:-1]]])
        for version, steps in groupby(range(len(c.versions)), c.versions.__getitem__):
            logits = models[version](read[:, [*steps]], past_key_values=cache).logits[0]
            out.append(torch.log_softmax(logits.float(), -1))
    return chosen(torch.cat(out), c.token_ids)


def run_with_updates(
    generator: Generator, models: list[PreTrainedModel], requests: list[Completion]
) -> dict[tuple[int, int], Completion]:
    """Run `requests`, changing to the next model after 5 steps and after 12."""
    generator.submit(requests)
    done: dict[tuple[int, int], Completion] = {}
    for version, steps in ((0, 5), (1, 7), (2, 500)):
        if version:
            generator.update_weights(version, models[version].state_dict())
        done |= {(c.group, c.index): c for c in generator.step(steps)}
    assert len(done) == len(requests)
    # The proofs below require sequences in flight at an update, and members of a group that were
    # admitted after an update on a prompt that was read before it.
    assert sum(len(set(c.versions)) > 1 for c in done.values()) >= 6
    assert any(c.versions[0] > done[c.group, 0].versions[0] for c in done.values())
    return done


def waiting_groups() -> list[Completion]:
    """Two groups, each larger than the slots."""
    return make_requests(2, 12, seed=9, lengths=(10, 30), tokens=(5, 28))


@pytest.mark.parametrize("family", FAMILIES)
def test_keep_means_new_weights_on_old_keys(family):
    models = [make_model(family, seed=i) for i in range(3)]
    generator = make_generator(models[0], kv_cache="keep")
    done = run_with_updates(generator, models, waiting_groups())
    references = [twin(m) for m in models]
    differences = []
    newest = [plain_logprobs(m, done.values()) for m in references]
    for i, ((group, _), c) in enumerate(done.items()):
        # A group's prompt is read once, under the weights of its first member's admission.
        expected = logprobs_on_old_keys(references, done[group, 0].versions[0], c)
        torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=1e-4, rtol=0)
        assert c.versions.tolist() == sorted(c.versions)
        differences.append((newest[c.versions[-1]][i] - expected)[-1].abs())
    # Old and new keys must give different numbers for the proof to mean anything.
    assert max(differences) > 0.5
    assert generator.stats()["recomputed_tokens"] == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_recompute_means_new_weights_throughout(family):
    models = [make_model(family, seed=i) for i in range(3)]
    generator = make_generator(models[0], kv_cache="recompute", prefill_tokens=50)
    done = run_with_updates(generator, models, waiting_groups())
    references = [twin(m) for m in models]
    by_version = zip(*(plain_logprobs(m, done.values()) for m in references), strict=True)
    for c, logprobs in zip(done.values(), by_version, strict=True):
        expected = torch.stack(logprobs).gather(0, torch.tensor([c.versions]))[0]
        torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=1e-4, rtol=0)
    assert generator.stats()["recomputed_tokens"] > 0


def test_each_token_has_the_version_that_sampled_it():
    models = [make_model(seed=i) for i in range(2)]
    generator = make_generator(models[0])
    requests = make_requests(3, 4, seed=1, tokens=(9, 9))
    generator.submit(requests)
    done = {(c.group, c.index): c for c in generator.step(4)}
    generator.update_weights(7, models[1].state_dict())
    done |= finish(generator)
    assert len(done) == len(requests)
    for (group, _), c in done.items():
        tokens = len(c.token_ids)
        assert c.finish_reason == "stop" or tokens == 9
        if group < 2:  # in flight at the update
            assert c.versions.tolist() == ([0] * 4 + [7] * 5)[:tokens]
        else:  # admitted to a slot that became free before the update or after it
            assert set(c.versions) <= {0, 7}
            assert c.versions.count(0) < 4
    assert done[2, 3].versions.tolist() == [7] * len(done[2, 3].token_ids)


def test_update_to_the_same_weights_changes_nothing():
    """`keep`, `recompute` and no update agree if the weights are the same."""
    model = make_model("qwen3")
    requests = make_requests(4, 4, seed=12, tokens=(5, 40))
    results = []
    for mode in (None, "keep", "recompute"):
        generator = make_generator(model, kv_cache=mode or "keep")
        generator.submit(requests)
        done = {(c.group, c.index): c for c in generator.step(6)}
        if mode:
            generator.update_weights(1, model.state_dict())
        results.append(done | finish(generator))
    for key, c in results[0].items():
        for other in results[1:]:
            assert other[key].token_ids == c.token_ids
            torch.testing.assert_close(
                torch.tensor(other[key].logprobs), torch.tensor(c.logprobs), atol=1e-4, rtol=0
            )


@pytest.mark.parametrize("tied", [True, False])
def test_all_weights_are_replaced(tied):
    """Weights given as `state_dict` (tied weights twice) or as parameters (once), in another
    dtype."""
    old, new = make_model(tied=tied, seed=0), make_model(tied=tied, seed=1).double()
    for state in (new.state_dict(), dict(new.named_parameters())):
        generator = make_generator(old)
        assert generator.update_weights(1, state) > 0  # seconds
        assert generator.model.state_dict().keys() == new.state_dict().keys()
        for name, tensor in generator.model.state_dict().items():
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, new.state_dict()[name].float())


def test_decoding_goes_on_under_the_old_weights_while_new_ones_are_fetched():
    models = [make_model(seed=i) for i in range(2)]
    generator, slow = make_generator(models[0]), SlowWeights(models[1])
    generator.submit(make_requests(2, 4, seed=1, tokens=(40, 60)))
    fetching = threading.Thread(target=generator.fetch, args=(1, slow))
    fetching.start()
    assert slow.begun.wait(WAIT_SECONDS)
    done = {(c.group, c.index): c for c in generator.step(6)}
    slow.arrive.set()
    fetching.join()
    done |= {(c.group, c.index): c for c in generator.step(6)}
    assert generator.swap(1) > 0  # seconds
    assert generator.version == 1
    assert generator.swap(1) >= 0  # in use already: nothing changes
    done |= finish(generator)
    references = [twin(m) for m in models]
    for c in done.values():
        assert c.versions.tolist() == ([0] * 12 + [1] * 100)[: len(c.token_ids)]
        expected = logprobs_on_old_keys(references, 0, c)
        torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=1e-4, rtol=0)


def test_wrong_weights_are_refused_and_change_nothing():
    model = make_model(tied=True)
    generator = make_generator(model)
    state = make_model(tied=True, seed=1).state_dict()
    norm = "model.norm.weight"
    untied = state | {"lm_head.weight": state["lm_head.weight"] + 1}
    wrong = {
        "unknown.*model.nrm": state | {"model.nrm.weight": state[norm]},
        "missing.*model.norm": {k: v for k, v in state.items() if k != norm},
        "missing.*embed_tokens": {
            k: v for k, v in state.items() if "embed" not in k and "lm_head" not in k
        },
        r"model.norm.weight: shape \(1,\)": state | {norm: torch.ones(1)},
        "tied": untied,
    }
    for message, bad in wrong.items():
        with pytest.raises(InputError, match=message):
            generator.update_weights(1, bad)
    assert generator.version == 0
    for name, tensor in generator.model.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])


def test_the_tokenizer_has_the_eos_of_the_models():
    assert make_tokenizer().eos_token_id == EOS
