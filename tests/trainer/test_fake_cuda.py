"""A step of the trainer on CUDA tensors without values, on machines without a GPU: it mixes no
devices, waits for nothing within a microbatch, and launches a bounded number of kernels."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from peft import inject_adapter_in_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from tests.fake_cuda import Launches, fake_cuda
from tests.trainer.rollouts import VOCAB, batch, taught
from tramontane.config import ObjectiveConfig, TrainerConfig
from tramontane.models import exchange
from tramontane.tokens import INSERTED
from tramontane.trainer.microbatch import cut_batch
from tramontane.trainer.objectives import load_objective
from tramontane.trainer.rows import Predictions
from tramontane.trainer.trainer import Trainer

GPU = "cuda:0"
FAMILIES = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 9},
    "gemma3_text": {"head_dim": 16, "final_logit_softcapping": None, "sliding_window": 9},
    "smollm3": {},
}


def inject(*arguments):
    """Adapters injected as peft does; it moves them to the GPU, which fake tensors cannot be."""
    with torch.device(GPU), patch("torch.nn.Module.to", lambda module, *args, **kwargs: module):
        return inject_adapter_in_model(*arguments)


def on_gpu(family: str = "llama", layers: int = 2, **settings) -> Trainer:
    """A trainer on a GPU that there is not; call it within `fake_cuda`."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(family, **sizes | FAMILIES[family])
    with torch.device(GPU):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="packed")
    objective = ObjectiveConfig.model_validate(settings.pop("objective", {}))
    settings = {"dtype": "bfloat16", "compile": False} | settings
    # `Launches` answers where the constructor reads values. Copies of fake tensors are of one mode.
    one_mode = patch.object(FakeTensorMode, "__deepcopy__", lambda self, memo: self, create=True)
    with Launches(), one_mode, patch("peft.inject_adapter_in_model", inject):
        found = Trainer(model, TrainerConfig(device=GPU, objective=objective, **settings), 10)
    found._head_scale = 1.0  # which it reads
    return found


def minibatch_of(**settings):
    """Made on the CPU, with values."""
    objective = ObjectiveConfig.model_validate(settings.pop("objective", {}))
    config = TrainerConfig(device=GPU, objective=objective, **settings)
    b = taught(batch(), top_k=3)
    b.sequences[1].versions[0] = INSERTED
    (minibatch,) = cut_batch(b, config)
    return minibatch


def backward(loss: torch.Tensor) -> None:
    """Backpropagate like `Tensor.backward`, whose engine asks the GPU for its streams."""
    gradients = {loss.grad_fn: {0: torch.ones_like(loss)}}
    # A checkpointed block is computed again once for each backward pass, which has a number.
    with patch("torch._C._current_graph_task_id", lambda: 1):
        run_nodes(loss, gradients)


def gradient_of(output: torch.Tensor, leaf: torch.Tensor) -> tuple[torch.Tensor]:
    """The gradient of a leaf like `torch.autograd.grad`, with the same engine."""
    run_nodes(output, {output.grad_fn: {0: torch.ones_like(output)}})
    return (leaf.grad,)


def run_nodes(loss: torch.Tensor, gradients: dict) -> None:
    for node in reversed(dependencies_first(loss.grad_fn)):
        given = gradients.pop(node, {})
        inputs = [given.get(i) for i in range(len(node._input_metadata))]
        found = getattr(node, "apply", node)(*inputs)
        found = found if isinstance(found, tuple) else (found,)
        for (parent, place), gradient in zip(node.next_functions, found, strict=False):
            if parent is not None and gradient is not None:
                about = parent._input_metadata[place]
                gradient = gradient.sum_to_size(about.shape).to(about.dtype)
                of_parent = gradients.setdefault(parent, {})
                of_parent[place] = of_parent[place] + gradient if place in of_parent else gradient


def dependencies_first(root) -> list:
    """The nodes of an autograd graph, each after those that it sends gradients to."""
    done, stack = {}, [(root, False)]
    while stack:
        node, left = stack.pop()
        if left:
            done[node] = None
        elif node not in done:
            stack.append((node, True))
            stack += [(n, False) for n, _ in node.next_functions if n is not None and n not in done]
    return list(done)


def launches(trainer, minibatch) -> Launches:
    """What the first microbatch launches, forward and backward."""
    trainer._freeze_logprobs([minibatch])
    with (
        Launches() as found,
        patch("torch.Tensor.backward", torch.no_grad()(backward)),
        patch("torch.autograd.grad", torch.no_grad()(gradient_of)),
    ):
        trainer._accumulate(minibatch, 0, trainer._working, 0)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_microbatch_mixes_no_devices_and_waits_for_nothing(family):
    minibatch = minibatch_of()
    with fake_cuda():
        trainer = on_gpu(family, layers=1)
        found = launches(trainer, minibatch)
        gradients = [p.grad for p in trainer.model.parameters()]
    assert found.waits == []
    assert all(g.device == torch.device(GPU) and g.dtype == torch.float32 for g in gradients)


@pytest.mark.parametrize("options", [{"top_k": 3, "discount": 1}, {"baseline": False}])
def test_distillation_mixes_no_devices_and_waits_for_nothing(options):
    objective = {"name": "distill", "distill": options}
    minibatch = minibatch_of(objective=objective)
    with fake_cuda():
        assert launches(on_gpu(layers=1, objective=objective), minibatch).waits == []


@pytest.mark.parametrize("setting", ["lora", "checkpointing", "offload"])
def test_what_saves_memory_waits_for_nothing_either(setting):
    keys = {"lora": {"lora": {"rank": 4}}}.get(setting, {"gradient_checkpointing": True})
    minibatch, budget = minibatch_of(), 512
    with fake_cuda() as pinned:
        trainer = on_gpu(
            layers=2, **keys, activation_offload=setting == "offload", microbatch_tokens=budget
        )
        found = [launches(trainer, minibatch) for _ in range(2)]
        trained = [p for p in trainer.model.parameters() if p.requires_grad]
    assert [x.waits for x in found] == [[], []]
    assert all(p.grad.device == torch.device(GPU) for p in trained)
    # A buffer of a full microbatch in bfloat16 for each block's input, used again by the second.
    assert pinned == [budget * 64 * 2] * (2 if setting == "offload" else 0)


@pytest.mark.parametrize(
    "objective",
    [
        {"magistral": {"kl_coef": 0.1, "kl_level": "sequence"}},
        {"magistral": {"importance_correction": "clipped", "entropy_coef": 0.1}},
        {"name": "gspo"},
        {"name": "cispo"},
        {"name": "spo", "spo": {"loss": "cross_entropy"}},
        {"name": "dro", "dro": {"values": "prompt"}},
        {"name": "jepo"},
        {"name": "sft"},
    ],
    ids=lambda objective: str(objective.get("name", objective)),
)
def test_no_objective_waits_for_the_gpu(objective):
    """The policy gradients and the sequence-level ones, with inserted tokens among others."""
    settings = ObjectiveConfig.model_validate(objective)
    loss = load_objective(settings).loss
    minibatch = minibatch_of(objective=objective)
    needs = settings.options.needs
    count = len(minibatch.behavior(0))
    minibatch.advantages = torch.zeros(len(minibatch.completions), 1 + ("targets" in needs))
    minibatch.advantages = minibatch.advantages.squeeze(1)
    with fake_cuda(), Launches() as found:
        values = [torch.zeros(count, device=GPU, requires_grad=True) for _ in range(4)]
        minibatch.frozen = minibatch.baselines = {"reference": [values[3].detach()]}
        loss(minibatch.tokens(0, Predictions(*values)), settings.options)
    assert found.waits == []


def test_a_trainers_memory_grows_in_segments_unless_the_environment_says_how(monkeypatch):
    settings = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    with fake_cuda():
        on_gpu(layers=1)
        assert settings == ["expandable_segments:True"]
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
        on_gpu(layers=1)
    assert len(settings) == 1


def kernels(**settings) -> int:
    minibatch = minibatch_of()
    with fake_cuda():
        return sum(launches(on_gpu(**settings), minibatch).kernels.values())


def test_a_microbatch_launches_few_kernels():
    """Without compiling, which fuses most kernels of a block. A change that raises a bound on
    purpose changes it here."""
    one, two = kernels(layers=1), kernels(layers=2)
    assert two - one <= 140  # of a block, forward and backward, with its gradients in float32
    assert one - (two - one) <= 290  # embeddings, head, loss and metrics


class Network:
    """What ranks that share rows send, where there is one of them."""

    def __init__(self, monkeypatch) -> None:
        self.sent = 0  # bytes of the exchanges that leave this rank
        monkeypatch.setattr(exchange.dist, "all_to_all_single", self.all_to_all)
        monkeypatch.setattr(exchange.dist, "all_gather", lambda parts, x, group: parts[0].copy_(x))

    def all_to_all(self, out, x, group):
        self.sent += x.nbytes * (len(x) - 1) // len(x)
        out.copy_(x)


def test_ranks_that_share_a_row_wait_for_nothing_and_send_what_the_page_says(monkeypatch):
    """docs/ranks.md: (2 Hq + 2 Hkv) · d · (c - 1) / c · N / c numbers of each block, forward and
    backward."""
    layers, heads, grouped, d, sharing = 2, 4, 2, 16, 2
    network = Network(monkeypatch)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=sharing)
    minibatch = minibatch_of(ranks=sharing, context_parallel=sharing)
    shared = exchange.HeadExchange(dist.group.WORLD)
    dist.destroy_process_group()
    with fake_cuda():
        trainer = on_gpu(layers=layers)
        alone = sum(launches(trainer, minibatch).kernels.values())
        trainer._exchange = shared
        found = launches(trainer, minibatch)
        tokens = minibatch.row(0).inputs["input_ids"].shape[1]
    assert found.waits == []
    numbers = layers * (2 * heads + 2 * grouped) * d * tokens * (sharing - 1) // sharing**2
    assert network.sent == 2 * 2 * numbers  # of two bytes
    # Of a block: four exchanges, there and back, each in order, sent, and in order again.
    assert sum(found.kernels.values()) - alone <= 24 * layers + 30
