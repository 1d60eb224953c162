r"""Verdicts in other packages: by their call shapes, and against the packages where installed."""

import asyncio
import importlib.util
import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tramontane.errors import InputError
from tramontane.verdicts import openrlhf, trl, verifiers, verl

PROGRAM = "```python\ndef square(x): return x * x\n```"
TESTS = {"type": "python_assert", "entry_point": "square", "code": "assert square(3) == 9"}
SECONDS = 120.0


def package(name):
    return pytest.importorskip(name, reason=f"{name} is not installed", exc_type=ImportError)


# ------------------------------------------------------------------------------------------- TRL


def test_trl_gets_a_number_or_none_for_each_completion():
    prompts = [[{"role": "user", "content": "What is 1/4 + 1/4?"}]] * 3
    said = [[{"role": "assistant", "content": text}] for text in (r"\boxed{0.5}", "0.5", "")]
    answers = [r"\frac12", r"\frac12", ""]
    asked = {"prompts": prompts, "completions": said, "trainer_state": None, "log_extra": None}
    assert trl.math(**asked, answer=answers) == [1.0, 0.0, 0.0]
    assert trl.math(**asked, solution=[r"\frac12"] * 3) == [1.0, 0.0, 0.0]
    boxed = [r"\boxed{1}"]
    assert trl.math(prompts=[""], completions=boxed, ground_truth=[None]) == [None]
    assert trl.math.__name__ == "tramontane_math"  # by which TRL logs it
    with pytest.raises(InputError, match="none of the columns answer, solution, ground_truth"):
        trl.math(prompts=[""], completions=boxed)


def test_trl_awaits_a_coroutine():
    function = trl.async_reward("code", settings={"code_tests": 5})
    assert inspect.iscoroutinefunction(function)
    given = {"prompts": ["", ""], "completions": [PROGRAM, "no program"], "tests": [TESTS] * 2}
    assert asyncio.run(function(**given)) == [1.0, 0.0]


def test_trl_lengths_are_those_of_the_tokens():
    length = trl.reward("length", l_max=10, l_cache=4)
    ids = [[0] * n for n in (6, 8, 12)]
    assert length(prompts=[""] * 3, completions=["x"] * 3, completion_ids=ids) == [0, -0.5, -1]


def test_trl_language_and_format():
    asked = "Combien font trois et quatre ? Explique ton raisonnement en quelques mots."
    french = "<think>Je dois additionner trois et quatre.</think>La somme vaut sept, \\boxed{7}."
    english = "<think>I have to add three and four here.</think>The sum is seven, \\boxed{7}."
    given = {"prompts": [asked] * 2, "completions": [french, english]}
    assert trl.language(**given) == [1.0, 0.0]
    assert trl.format(**given) == [1.0, 1.0]
    assert trl.format(prompts=[asked], completions=["sept"]) == [0.0]


@pytest.mark.slow
def test_trl_trains_with_the_rewards(tmp_path):
    package("trl")
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    from tests.environments.templates import tokenizer_of

    rows = Dataset.from_list([{"prompt": "What is 1 + 1?", "answer": "2"}] * 4)
    tokenizer = tokenizer_of.__wrapped__("qwen3")
    tokenizer.pad_token = tokenizer.eos_token
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_hidden_layers=1, **sizes))
    config = GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=4, num_generations=4, max_steps=1,
        max_completion_length=8, report_to="none", use_cpu=True, logging_steps=1,
    )  # fmt: skip
    rewards = [trl.math, trl.format, trl.async_reward("length", l_max=4, l_cache=2)]
    trainer = GRPOTrainer(
        model, reward_funcs=rewards, args=config, train_dataset=rows, processing_class=tokenizer
    )
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["rewards/tramontane_math/mean"] == 0.0
    assert -1 <= logged["rewards/tramontane_length/mean"] <= 0


# ------------------------------------------------------------------------------------------ verl


def test_verl_gets_a_score_and_what_it_logs():
    right = {"score": 1.0, "acc": 1.0, "unscorable": 0.0}
    given = {"data_source": "gsm8k", "extra_info": {"index": 0, "num_turns": None}}
    assert verl.compute_score(solution_str=r"\boxed{5}", ground_truth="5", **given) == right
    # Of some sets, the ground truth is a number.
    assert verl.compute_score(solution_str=r"\boxed{5}", ground_truth=5, **given) == right
    wrong = {"score": 0.0, "acc": 0.0, "unscorable": 0.0}
    assert verl.compute_score(solution_str=r"\boxed{6}", ground_truth="5", **given) == wrong
    lost = {"score": 0.0, "acc": 0.0, "unscorable": 1.0}
    assert verl.compute_score(solution_str=r"\boxed{6}", ground_truth="", **given) == lost
    routed = {"reward_router_address": "127.0.0.1:1", "reward_model_tokenizer": None}
    program = "```python\nprint(int(input()) * 2)\n```"
    tests = json.dumps({"inputs": ["3\n"], "outputs": ["6\n"]})
    asked = verl.compute_score_async("apps", program, tests, None, **routed)
    assert inspect.iscoroutinefunction(verl.compute_score_async) and asyncio.run(asked) == right
    # JSON text that is an answer
    assert verl.compute_score("", r"\boxed{[1,2]}", "[1,2]") == right


def test_verl_loads_the_function_by_its_path():
    utils = package("verl.utils.import_utils")
    found = utils.load_extern_object("pkg://tramontane.verdicts.verl", "compute_score")
    assert found("gsm8k", r"\boxed{5}", "5", {})["score"] == 1.0


# -------------------------------------------------------------------------------------- OpenRLHF


def test_openrlhf_gets_tensors_from_a_file(tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text("from tramontane.verdicts.openrlhf import reward_func\n")
    spec = importlib.util.spec_from_file_location("reward_func", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    prompts = [r"Put 5 in \boxed{}.", "What is 2 + 3?", ""]
    queries = [prompts[0], prompts[1] + r"It is \boxed{5}", r"\boxed{5}"]
    found = module.reward_func(queries, prompts, ["5", "5", None])
    assert found["rewards"].tolist() == [0.0, 1.0, 0.0]  # a box of the prompt is no answer
    assert found["scores"].tolist() == [0.0, 1.0, 0.0]
    assert found["extra_logs"]["unscorable"].tolist() == [0.0, 0.0, 1.0]


def test_openrlhf_reads_the_completion_behind_special_tokens_and_the_prompt():
    [sample] = openrlhf.samples([r"<s>Say \boxed{5}. No."], [r"Say \boxed{5}."], ["5"])
    assert sample.text == " No."


# ------------------------------------------------------------------------------------- verifiers


def test_verifiers_rewards_raise_where_nothing_can_be_judged():
    task = SimpleNamespace(answer="5", prompt_text="What is 2 + 3?")
    for said, reward in ((r"\boxed{5}", 1.0), (r"\boxed{6}", 0.0)):
        assert asyncio.run(verifiers.math(task, SimpleNamespace(last_reply=said))) == reward
    lost = SimpleNamespace(answer=None, prompt_text="")
    with pytest.raises(verifiers.Unscorable, match="no reference"):
        asyncio.run(verifiers.math(lost, SimpleNamespace(last_reply=r"\boxed{6}")))
    prompt = [{"role": "user", "content": "?"}]
    said = [{"role": "assistant", "content": PROGRAM}]
    code = verifiers.rubric("code")
    state = {"info": {"tests": TESTS}}
    assert asyncio.run(code(prompt, said, "", {"tests": TESTS}, state=state)) == 1.0
    assert {"completion", "answer", "info"} <= inspect.signature(code).parameters.keys()


def test_a_task_of_verifiers_takes_the_reward_from_its_config(monkeypatch):
    vf = package("verifiers.v1")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "verifier"))
    from sums_taskset import Sum, SumTask
    from verifiers.v1.configs.task import TaskConfig

    plugged = {"checked": {"fn": "tramontane.verdicts.verifiers:math", "weight": 2.0}}
    task = SumTask(Sum(prompt="1 + 1?", answer="2"), TaskConfig(rewards=plugged))
    trace = vf.Trace(
        task=vf.TraceTask(type="SumTask", data=task.data),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=[
            vf.MessageNode(message=vf.UserMessage(content="1 + 1?")),
            vf.MessageNode(
                parent=0, message=vf.AssistantMessage(content=r"\boxed{2}"), sampled=True
            ),
        ],
    )
    asyncio.run(task.score(trace))
    assert trace.rewards["checked"].score == 1.0 and trace.rewards["checked"].weight == 2.0


# ------------------------------------------------------------------------- lm-eval and Inspect


def test_lm_eval_filters_and_measures():
    package("lm_eval")
    from lm_eval.api.registry import get_filter, get_metric, get_metric_aggregation

    from tramontane.verdicts import lm_eval

    said = [["<think>\\boxed{3}</think>It is \\boxed{1/2}.", "no box"]]
    assert get_filter("tramontane")().apply(said, [{}]) == [["1/2", "[invalid]"]]
    metric = get_metric("tramontane")
    assert metric(references=["0.5"], predictions=["1/2"]) == 1.0
    assert metric(references=["0.5"], predictions=[r"\boxed{1/2}"]) == 1.0
    assert metric(references=["0.5"], predictions=["[invalid]"]) == 0.0
    assert get_metric_aggregation("tramontane")([1.0, 0.0]) == 0.5
    assert lm_eval.process_results({"answer": 5}, [r"\boxed{5}"]) == {"math_verdict": 1.0}


@pytest.mark.slow
def test_lm_eval_runs_a_task_with_the_filter_and_metric(tmp_path):
    package("lm_eval")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "1+1?", "answer": "2"}) + "\n")
    (tmp_path / "task.yaml").write_text(
        "task: told\ndataset_path: json\noutput_type: generate_until\ntest_split: train\n"
        f"dataset_kwargs: {{data_files: {tmp_path}/rows.jsonl}}\n"
        "doc_to_text: '{{question}}'\ndoc_to_target: '{{answer}}'\n"
        "generation_kwargs: {until: []}\n"
        "filter_list:\n- {name: boxed, filter: [{function: tramontane}, {function: take_first}]}\n"
        "metric_list:\n- {metric: tramontane, aggregation: mean, higher_is_better: true}\n"
    )
    program = (
        "import sys, lm_eval, tramontane.verdicts.lm_eval\n"
        "from lm_eval.api.model import LM\n"
        "from lm_eval.tasks import TaskManager\n"
        "class Told(LM):\n"
        "    def generate_until(self, requests, **_):\n"
        "        return [r'It is \\boxed{4/2}' for _ in requests]\n"
        "    loglikelihood = loglikelihood_rolling = None\n"
        "manager = TaskManager(include_path=sys.argv[1], include_defaults=False)\n"
        "found = lm_eval.simple_evaluate(\n"
        "    Told(), tasks=['told'], task_manager=manager, bootstrap_iters=0)\n"
        "assert found['results']['told']['tramontane,boxed'] == 1.0, found['results']\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


def test_inspect_scores_a_state():
    package("inspect_ai")
    from inspect_ai.model import ModelOutput
    from inspect_ai.scorer import Score, Target
    from inspect_ai.solver import TaskState

    from tramontane.verdicts.inspect_ai import verdict

    def scored(said: str, *targets: str) -> Score:
        output = ModelOutput.from_content("mockllm/model", said)
        state = TaskState(
            "mockllm/model", 1, 1, "1/4 + 1/4?", [], Target([*targets]), output=output
        )
        return asyncio.run(verdict()(state, Target([*targets])))

    right, wrong = scored(r"\boxed{0.5}", r"\frac12"), scored(r"\boxed{0.4}", r"\frac12")
    assert (right.value, right.answer, wrong.value) == ("C", "0.5", "I")
    assert wrong.explanation == "not the reference" and wrong.metadata["reason"] == "different"
    assert scored(r"\boxed{3}", "-3", "3").value == "C"
    lost = scored(r"\boxed{3}", "")
    assert lost.value not in ("C", "I", 0) and "no reference" in lost.explanation
