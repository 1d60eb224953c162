"""vLLM as a generator, with real vLLM: the promises of the embedded generator, on one process."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.generator.slot_models import (
    EOS,
    VOCAB,
    chosen,
    finish,
    make_requests,
    make_tokenizer,
    reference_logprobs,
)
from tests.generator.test_inflight_updates import logprobs_on_old_keys
from tests.magistral import write_magistral
from tramontane.config import GeneratorConfig
from tramontane.errors import InputError
from tramontane.generator import VllmGenerator, load_generator
from tramontane.models.extract import extract
from tramontane.models.loading import load_model
from tramontane.models.transplant import transplant
from tramontane.placement import WorkerDied
from tramontane.types import Completion, SamplingParams

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

MAX_LEN = 100
# Prints the architecture as which vLLM takes a checkpoint.
CONFIG_CHECK = """
import sys
from vllm.engine.arg_utils import EngineArgs
args = EngineArgs(model=sys.argv[1], enforce_eager=True, max_model_len=64)
print(args.create_engine_config().model_config.architecture)
"""


def make_llama(seed: int = 0, tied: bool = True) -> PreTrainedModel:
    """A small random Llama, with heads of a size that vLLM's kernels have."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval().requires_grad_(False)


class Models:
    """A generator that can be given the weights of any of `models`, which have versions 1, 2, …."""

    def __init__(self, generator: VllmGenerator, models: list[PreTrainedModel]) -> None:
        self.generator, self.models = generator, models
        self.by_version: dict[int, PreTrainedModel] = {0: models[0]}

    def use(self, number: int) -> int:
        """Send the weights of a model; returns their version."""
        version = self.generator.version + 1
        self.generator.update_weights(version, self.models[number].state_dict())
        self.by_version[version] = self.models[number]
        return version


def make_generator(folder: Path, slots: int = 8, **config) -> VllmGenerator:
    settings = GeneratorConfig(kind="vllm", **config)
    generator = load_generator(str(folder), settings, slots, MAX_LEN)
    assert isinstance(generator, VllmGenerator)
    return generator


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(vllm_environment, tmp_path_factory) -> Models:
    """Models with tied embeddings."""
    found = [make_llama(seed) for seed in range(3)]
    folder = save(found[0], tmp_path_factory.mktemp("checkpoint"))
    # Fewer tokens a step than a few prompts have together: some prompts wait for the next step.
    return Models(make_generator(folder, prefill_tokens=64), found)


@pytest.fixture
def generator(models) -> VllmGenerator:
    """With the first model's weights, and nothing in flight."""
    models.generator.cancel_all()
    models.use(0)
    return models.generator


def assert_exact(c: Completion, model: PreTrainedModel, temperature: float = 1.0) -> None:
    """Recorded log-probs are those of a plain forward."""
    expected = chosen(
        reference_logprobs(model, c.prompt_ids, c.token_ids, temperature), c.token_ids
    )
    torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=1e-4, rtol=0)


def test_greedy_completions_are_those_of_the_model(generator, models):
    requests = make_requests(6, 2, seed=3, lengths=(3, 40), tokens=(5, 40), temperature=0)
    generator.submit(requests)
    for c in finish(generator).values():
        logprobs = reference_logprobs(models.models[0], c.prompt_ids, c.token_ids)
        assert logprobs.argmax(-1).tolist() == c.token_ids.tolist()
        assert_exact(c, models.models[0])


def test_sampled_log_probs_are_of_the_distribution_sampled_from(generator, models):
    """Temperature included; every end is an EOS token or `max_tokens`."""
    requests = make_requests(6, 4, seed=5, tokens=(5, 40), temperature=0.7)
    wanted = {(r.group, r.index): r.sampling.max_tokens for r in requests}
    generator.submit(requests)
    done = finish(generator)
    assert done.keys() == wanted.keys()
    assert {c.finish_reason for c in done.values()} == {"stop", "length"}
    for key, c in done.items():
        assert_exact(c, models.models[0], 0.7)
        assert c.token_ids.count(EOS) == (c.finish_reason == "stop")
        assert c.finish_reason == "stop" or len(c.token_ids) == wanted[key]
        assert c.text == " ".join(f"w{t}" for t in c.token_ids if t > 2)


def test_seeds_decide_the_tokens(generator):
    requests = make_requests(3, 3, seed=7, tokens=(20, 20))
    found = []
    for _ in range(2):
        generator.submit(requests)
        found.append({key: c.token_ids.tolist() for key, c in finish(generator).items()})
    assert found[0] == found[1]
    assert found[0][0, 0] != found[0][0, 1]


def test_keep_means_new_weights_on_old_keys(generator, models):
    first = generator.version
    generator.submit(make_requests(3, 4, seed=9, lengths=(10, 30), tokens=(20, 40)))
    done = {(c.group, c.index): c for c in generator.step(5)}
    second = models.use(1)
    done |= {(c.group, c.index): c for c in generator.step(7)}
    third = models.use(2)
    done |= finish(generator)
    assert len(done) == 12
    assert sum(set(c.versions) == {first, second, third} for c in done.values()) >= 6
    differences = []
    for c in done.values():
        assert c.versions.tolist() == sorted(c.versions)
        expected = logprobs_on_old_keys(models.by_version, c.versions[0], c)
        torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=1e-4, rtol=0)
        plain = reference_logprobs(models.by_version[c.versions[-1]], c.prompt_ids, c.token_ids)
        differences.append((chosen(plain, c.token_ids) - expected)[-1].abs())
    assert max(differences) > 0.5  # old and new keys give different numbers


def test_recompute_means_new_weights_throughout(generator, models):
    generator.config = generator.config.model_copy(update={"kv_cache": "recompute"})
    generator.submit(make_requests(3, 4, seed=9, lengths=(10, 30), tokens=(20, 40)))
    done = {(c.group, c.index): c for c in generator.step(5)}
    models.use(1)
    done |= {(c.group, c.index): c for c in generator.step(7)}
    models.use(2)
    done |= finish(generator)
    generator.config = generator.config.model_copy(update={"kv_cache": "keep"})
    assert sum(len(set(c.versions)) > 2 for c in done.values()) >= 6
    for c in done.values():
        logprobs = [
            reference_logprobs(models.by_version[v], c.prompt_ids, c.token_ids)[i, t]
            for i, (v, t) in enumerate(zip(c.versions, c.token_ids, strict=True))
        ]
        torch.testing.assert_close(
            torch.tensor(c.logprobs), torch.stack(logprobs), atol=1e-4, rtol=0
        )
    assert generator.stats()["recomputed_tokens"] > 0


def test_prompts_are_read_anew_under_new_weights(generator, models):
    """Cached prompts of an older version are not reused, even if nothing was cleared."""
    prompt = [3 + i % 90 for i in range(80)]
    request = Completion.requested(0, 0, prompt, 1, SamplingParams(10, temperature=0))
    generator.submit([request])
    finish(generator)
    version = models.use(1)
    generator.submit([request])
    (c,) = finish(generator).values()
    assert c.versions.tolist() == [version] * len(c.token_ids)
    assert_exact(c, models.models[1])


def test_polls_report_each_token_once(generator):
    requests = make_requests(4, 3, seed=14, tokens=(10, 40))
    known = {(r.group, r.index): r for r in requests}
    lengths = dict.fromkeys(known, 0)
    done: dict[tuple[int, int], Completion] = {}
    submitted = requests
    grown: dict[tuple[int, int], list[int]] = {key: [] for key in known}
    while len(done) < len(requests):
        progress = generator.poll(submitted)
        submitted = []
        for key, new in progress.grown.places():
            grown[key] += progress.grown.token_ids[new]
            lengths[key] += len(progress.grown.versions[new])
        done |= {(c.group, c.index): c for c in progress.completions}
    for key, c in done.items():
        assert c.token_ids.tolist()[: len(grown[key])] == grown[key]
        assert lengths[key] == len(grown[key])
    assert sum(map(len, grown.values())) > 0
    assert progress.busy_seconds > 0


def test_a_probe_is_exact_and_drops_nothing_in_flight(generator, models):
    requests = make_requests(2, 4, seed=3, tokens=(60, 60), temperature=0)
    generator.submit(requests)
    done = {(c.group, c.index): c for c in generator.step(5)}
    prompts = [[5, 6, 7], [8] * 30, [9]]
    for c in generator.probe(prompts, tokens=25, seed=1, temperature=0.8):
        assert len(c.token_ids) == 25
        assert c.versions.tolist() == [generator.version] * 25
        assert c.prompt_ids in prompts
        assert_exact(c, models.models[0], 0.8)
    done |= finish(generator)
    assert len(done) == len(requests)
    for c in done.values():
        assert_exact(c, models.models[0])


def test_effective_weights_are_the_models(generator, models):
    state = models.models[0].state_dict()
    found = generator.weights()
    assert found.keys() == state.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, state[name], atol=1e-5, rtol=1e-4)


def test_wrong_weights_are_refused_and_change_nothing(generator, models):
    version, state = generator.version, models.models[1].state_dict()
    wrong = {
        "unknown.*model.nrm": state | {"model.nrm.weight": torch.ones(64)},
        "missing.*model.norm": {k: v for k, v in state.items() if k != "model.norm.weight"},
        r"model.norm.weight: shape \(1,\)": state | {"model.norm.weight": torch.ones(1)},
        "lm_head.weight are tied": state | {"lm_head.weight": state["lm_head.weight"] + 1},
    }
    for message, bad in wrong.items():
        with pytest.raises(InputError, match=message):
            generator.update_weights(version + 1, bad)
    assert generator.version == version
    generator.submit(make_requests(1, 2, seed=1, tokens=(9, 9)))
    for c in finish(generator).values():
        assert_exact(c, models.models[0])


def test_requests_that_cannot_run_are_refused(generator):
    params = SamplingParams(40)
    for message, request in {
        "empty prompt": Completion.requested(0, 0, [], 0, params),
        "outside the model's vocabulary": Completion.requested(0, 0, [VOCAB], 0, params),
        f"length of {MAX_LEN}": Completion.requested(0, 0, [5] * 70, 0, params),
        "nothing to generate": Completion.requested(0, 0, [5], 0, SamplingParams(0)),
    }.items():
        with pytest.raises(InputError, match=message):
            generator.submit([request])
    assert generator.pending() == []


def test_a_larger_size_starts_vllm_anew_with_the_newest_weights(generator, models):
    version, pid = models.use(1), generator.pid
    generator.submit(make_requests(1, 2, tokens=(30, 30)))
    with pytest.raises(RuntimeError, match="2 sequences unfinished"):
        generator.resize(8, 150)
    generator.cancel_all()
    generator.resize(4, 50)
    assert generator.pid == pid
    with pytest.raises(InputError, match="length of 50"):
        generator.submit([Completion.requested(0, 0, [5] * 30, 0, SamplingParams(40))])
    generator.resize(8, 150)
    assert generator.pid != pid
    generator.submit([Completion.requested(0, 0, [5] * 110, 0, SamplingParams(40))])
    (c,) = finish(generator).values()
    assert set(c.versions) == {version}
    assert_exact(c, models.models[1])


def test_requests_of_a_killed_process_continue_elsewhere(generator, models, tmp_path):
    """Last of the module: it ends the shared process. The other generator's model is untied."""
    requests = make_requests(2, 3, seed=4, tokens=(40, 40), temperature=0)
    generator.submit(requests)
    generator.step(6)
    snapshot = generator.pending()
    assert any(r.token_ids for r in snapshot)
    os.kill(generator.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=f"process {generator.pid} died in advance .SIGKILL"):
        generator.step(1)
    second = make_generator(save(make_llama(seed=5, tied=False), tmp_path))
    version = 7
    second.update_weights(version, models.models[0].state_dict())
    second.submit(snapshot)
    for c in finish(second).values():
        begun = next(r for r in snapshot if (r.group, r.index) == (c.group, c.index))
        count = len(begun.token_ids)
        assert c.token_ids[:count] == begun.token_ids
        assert set(c.versions[count:]) == {version}
        assert_exact(c, models.models[0])


@pytest.mark.usefixtures("vllm_environment")
def test_the_text_half_of_a_wrapper_is_sampled(tmp_path: Path) -> None:
    """vLLM gets a causal LM's config: it would take the checkpoint's own for a vision model."""
    folder = str(write_magistral(tmp_path))
    generator = load_generator(folder, GeneratorConfig(kind="vllm", dtype="float32"), 4, MAX_LEN)
    assert isinstance(generator, VllmGenerator)
    prompts = [[1, 3, 60, 61, 4], [1, 3, 90, 4]]
    half = load_model(folder)
    for prompt, completion in zip(prompts, generator.probe(prompts, 8, 0, 1.0), strict=True):
        tokens = list(completion.token_ids)
        expected = chosen(reference_logprobs(half, prompt, tokens), tokens)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)
    for name, weight in generator.weights().items():
        assert torch.equal(weight, half.state_dict()[name])


@pytest.mark.parametrize("which", ["half", "whole"])
def test_vllms_config_check_takes_what_is_written(vllm_environment, tmp_path, which):
    """By the commands, of a checkpoint as Mistral publishes it: the text half, and the whole that
    it is put back into, which vLLM looks at with torchvision."""
    parent = str(write_magistral(tmp_path / "published"))
    written, architecture = extract(parent, tmp_path / "half"), "MistralForCausalLM"
    if which == "whole":
        if "torchvision" not in vllm_environment.versions:
            pytest.skip("vLLM imports torchvision for Mistral 3, and its environment has none")
        transplant(str(written), parent, tmp_path / "whole")
        written, architecture = tmp_path / "whole", "Mistral3ForConditionalGeneration"
    command = [vllm_environment.python, "-c", CONFIG_CHECK, str(written)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == architecture, done.stderr[-2000:]
