"""Keys of TRL, verl, OpenRLHF and prime-rl are answered with this project's."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT
from tramontane.config import Config, load_config, parse_settings
from tramontane.config.peers import counterpart, peer_keys
from tramontane.config.section import load_section, paths
from tramontane.config.sft import SFTConfig
from tramontane.data.layouts import verl
from tramontane.data.load import load_problems
from tramontane.errors import InputError

PAGE = (ROOT / "docs/coming-from.md").read_text()
METRICS = PAGE.partition("## Metrics")[2].partition("## Keys")[0]


def refused(override: str) -> str:
    with pytest.raises(InputError) as error:
        parse_settings(Config, {}, [override], "run.yaml")
    return str(error.value)


def test_every_counterpart_is_a_key_and_every_name_has_an_answer() -> None:
    keys = peer_keys()
    assert {key.peer for key in keys} == {"TRL", "verl", "OpenRLHF", "prime-rl"}
    for key in keys:
        assert not key.key or key.key in paths(Config), key
        assert not key.sft or key.sft in paths(SFTConfig), key
        assert key.key or key.sft or key.note, key
    names = [(key.peer, key.name) for key in keys]
    assert len({*names}) == len(names)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("num_generations=8", "pipeline.group_size"),
        ("pipeline.num_generations=8", "pipeline.group_size"),
        ("beta=0.04", "trainer.objective.magistral.kl_coef"),
        ("learning_rate=1e-5", "trainer.learning_rate"),
        ("algorithm.adv_estimator=grpo", "trainer.objective.name"),
        ("data.train_files=train.parquet", "data.train"),
        ("actor_rollout_ref.rollout.n=8", "pipeline.group_size"),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "trainer.learning_rate"),
        ("trainer.total_epochs=3", "pipeline.updates"),
        ("n_samples_per_prompt=8", "pipeline.group_size"),
        ("orchestrator.rollouts_per_example=8", "pipeline.group_size"),
        ("model.name=Qwen/Qwen3-0.6B", "model"),
        ("max_train_samples=100", "data.limit"),
        ("max_tool_calling_iterations=4", "conversation.turns"),
        ("vllm_importance_sampling_clip_max=3.0", "trainer.objective.magistral.importance_cap"),
        ("actor_rollout_ref.actor.optim.clip_grad=1.0", "trainer.max_grad_norm"),
        ("actor_rollout_ref.rollout.multi_turn.function_tool_path=t.py", "data.tools"),
        ("reward.custom_reward_function.path=r.py", "verifier.reward.custom"),
        ("data.apply_chat_template_kwargs={}", "data.chat_template_kwargs"),
        ("actor.model_name_or_path=Qwen/Qwen3-0.6B", "model"),
        ("actor.adam.lr=1e-6", "trainer.learning_rate"),
        ("data.prompt_dataset=train.jsonl", "data.train"),
        ("rollout.n_samples_per_prompt=8", "pipeline.group_size"),
        ("algo.kl.init_coef=0.01", "trainer.objective.magistral.kl_coef"),
        ("orchestrator.eval.group_size=4", "evaluation.samples"),
        ("orchestrator.train.sampling.max_completion_tokens=512", "pipeline.l_max"),
        ("deployment.num_infer_gpus=2", "generator.workers"),
        ("reward_model.overlong_buffer.len=512", "verifier.reward.length"),  # of its section
        ("orchestrator.buffer.online_difficulty_filtering=true", "pipeline.diversity"),
        ("ring_attn_size=2", "trainer.context_parallel"),
        ("rollout_func=my.rollout", "data.environment"),
    ],
)
def test_a_peers_key_is_answered_with_ours(override: str, key: str) -> None:
    message = refused(override)
    assert f"here it is {key}" in message and "a key of" in message


def test_the_most_specific_entry_answers() -> None:
    message = refused("actor_rollout_ref.rollout.temperature=1.0")
    assert "rollout.temperature: a key of verl; here it is generator.temperature" in message


def test_a_key_without_its_section_is_found() -> None:
    assert "group_size: unknown key; here it is pipeline.group_size" in refused("group_size=8")


def test_what_does_not_exist_here_is_explained() -> None:
    message = refused("actor_rollout_ref.model.use_remove_padding=true")
    assert "no such key here (sequences are always packed without padding)" in message


def test_misspelled_keys_keep_their_suggestion() -> None:
    assert "did you mean 'l_max'?" in refused("pipeline.l_mx=3")
    assert "valid keys: " in refused("nothing_like_it=3")


def test_a_text_in_place_of_a_section_is_its_main_key(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("data: train.jsonl\ntrainer: {objective: cispo}\n")
    config = load_config(file, ["data.limit=3", "trainer.objective.cispo.eps_max=4"])
    assert (config.data.train, config.data.limit) == ("train.jsonl", 3)
    assert config.trainer.objective.name == "cispo"
    assert config.trainer.objective.cispo.eps_max == 4
    file.write_text("data: traces.jsonl\noutput: out\n")
    assert load_section(SFTConfig, file).data.train == "traces.jsonl"
    assert "GRPO is the objective `magistral` with these keys" in refused("trainer.objective=grpo")
    assert "pipeline: a section with keys, not 3; write pipeline: {updates: …}" in refused(
        "pipeline=3"
    )


def test_verls_rows_are_answered_with_their_layout(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    row = {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": "What is 3 + 4?"}],
        "reward_model": {"style": "rule", "ground_truth": "7"},
    }
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(InputError, match="data.sets: {mine: {source: FILE, layout: verl}}"):
        load_problems(str(file), Config().data, split="train", limit=None, seed=0)
    as_text = row | {"reward_model": json.dumps(row["reward_model"])}
    file.write_text(json.dumps(as_text) + "\n")
    with pytest.raises(InputError, match="data.sets: {mine: {source: FILE, layout: verl}}"):
        load_problems(str(file), Config().data, split="train", limit=None, seed=0)
    assert verl(as_text)["answer"] == verl(row)["answer"] == "7"


def test_every_key_of_the_table_is_answered_with_its_own_row() -> None:
    """Not with a key here of the same name, nor with the row of another project."""
    for kind, own in ((Config, "key"), (SFTConfig, "sft")):
        known = paths(kind)
        for row in peer_keys():
            here = getattr(row, own)
            if row.name in known or not (here or row.note):
                continue
            found = counterpart(row.name, known)
            assert found and found.peer, row
            alike = [each for each in peer_keys() if each.name == row.name]
            assert not here or found.key in {getattr(each, own) for each in alike}, (row, found)


@pytest.mark.parametrize("row", re.findall(r"^\| .+ \|$", METRICS, re.M)[2:])
def test_the_metrics_of_the_page_are_recorded(row: str) -> None:
    source = "".join(file.read_text() for file in (ROOT / "src").rglob("*.py"))
    names = re.findall(r"`([A-Za-z_0-9]+)`", row.rpartition(" | ")[2])
    assert names or "](environments.md)" in row
    for name in names:
        assert re.search(rf"\b{re.sub('_(age_.*|low|high|NAME)$', '', name)}", source), name


def test_one_wrong_value_hides_no_other_answer() -> None:
    raw: dict[str, Any] = {"log_completions": True, "num_generations": 8, "seed": True}
    raw |= {"inference": {"model": {"enforce_eager": True}}}
    with pytest.raises(InputError) as error:
        parse_settings(Config, raw, [], "trl.yaml")
    lines = str(error.value).splitlines()
    (own,) = (line for line in lines if "log_completions: a number, not true" in line)
    assert "between two tables" in own
    for part in ("num_generations: unknown key", "seed: a number", "here it is generator.vllm"):
        assert any(part in line for line in lines), part


def test_a_config_in_toml_is_named(tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text("max_steps = 20\n")
    with pytest.raises(InputError, match=r"rl\.toml: TOML, and a config is YAML"):
        load_config(tmp_path / "rl.toml")


def test_an_override_that_the_shell_cut_says_so() -> None:
    assert "unless the whole override is in quotes" in refused("data.fields={problem:")
    assert "quotes" not in refused("data.fields={problem: a b: c}")
