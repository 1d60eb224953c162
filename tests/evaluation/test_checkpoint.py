"""Evaluation and generation under the settings of training; malformed results are explained."""

from pathlib import Path

import pytest
import yaml

import tramontane
from tramontane.config import Config
from tramontane.data.prompts import PromptEncoder
from tramontane.errors import InputError
from tramontane.evaluation.checkpoint import problems_of
from tramontane.evaluation.malformed import Malformed
from tramontane.evaluation.settings import Sampling, run_of, settings_for
from tramontane.run.input import read_input

TRAINED = {
    "model": "tiny",
    "seed": 7,
    "data": {
        "train": "own.jsonl",
        "eval": "held_out.jsonl",
        "system_prompt": "Be brief.",
        "domain": "quiz",
        "fields": {"problem": "q"},
    },
    "pipeline": {"l_max": 300},
    "evaluation": {"problems": 12, "samples": 2, "temperature": 0.5},
    "verifier": {"domains": {"quiz": {}}, "reward": {"length": 0}},
}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    weights = tmp_path / "run/checkpoints/update_4/weights"
    weights.mkdir(parents=True)
    config = Config.model_validate(TRAINED).model_dump(mode="json")
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump(config))
    return weights


def test_a_checkpoint_of_a_run_is_measured_as_the_run_does(weights: Path) -> None:
    assert run_of(weights) == weights.parents[2]
    found = settings_for(weights, None, None, [], {})
    assert found.config.data.system_prompt == "Be brief."
    assert found.config.verifier.reward.length == 0
    assert (found.config.data.eval, found.config.data.domain) == ("held_out.jsonl", "quiz")
    assert found.sampling == Sampling(12, 2, 0.5, max_tokens=300, seed=7)
    assert found.config.model == str(weights)


def test_other_problems_are_read_by_their_own_columns(weights: Path) -> None:
    found = settings_for(weights, "math500.jsonl", None, [], {"max_tokens": 64, "device": "cpu"})
    assert found.config.data.system_prompt == "Be brief."
    assert (found.config.data.domain, found.config.data.fields) == (None, {})
    assert (found.sampling.problems, found.sampling.max_tokens) == (None, 64)


def test_a_config_and_overrides_come_before_the_runs(weights: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("data: {system_prompt: magistral}\n")
    found = settings_for(weights, "x.jsonl", other, ["data.limit=3"], {"dtype": "bfloat16"})
    assert (found.config.data.system_prompt, found.config.data.limit) == ("magistral", 3)
    assert (found.config.generator.dtype, found.sampling.max_tokens) == ("bfloat16", 512)
    with pytest.raises(InputError, match=r"other\.yaml: data\.limt: unknown key"):
        settings_for(weights, "x.jsonl", other, ["data.limt=3"], {})


def test_without_a_run_the_defaults_hold(tmp_path: Path) -> None:
    assert run_of("tiny") is None and run_of(tmp_path) is None
    found = settings_for("tiny", "playground:", None, [], {})
    assert (found.config.data.system_prompt, found.sampling) == (None, Sampling())


def test_the_configured_system_prompt_reaches_the_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    encode_all = PromptEncoder.encode_all

    def spy(self, prompts, where=()):  # type: ignore[no-untyped-def]
        seen.extend(self.render(prompt) for prompt in prompts)
        return encode_all(self, prompts, where)

    monkeypatch.setattr(PromptEncoder, "encode_all", spy)
    sizes = {"max_tokens": 8, "samples": 1, "slots": 4}
    overrides = {"data.system_prompt": "Be brief."}
    rows = [{"prompt": [{"role": "user", "content": "What is 1 + 1?"}], "answer": "2"}]
    tramontane.evaluate("tiny", rows, overrides=overrides, **sizes)  # type: ignore[arg-type]
    assert seen and all("Be brief." in text for text in seen if "1 + 1?" in text)
    seen.clear()
    tramontane.generate(
        "tiny", "What is 1 + 1?", overrides=overrides, max_tokens=8, dtype="bfloat16"
    )
    assert "Be brief." in seen[-1]


def test_greedy_samples_are_all_alike_and_a_warning_says_so() -> None:
    rows = [{"problem": "What is 1 + 1?", "answer": "2"}]
    with pytest.warns(UserWarning, match="samples 2: at temperature 0 .* all alike"):
        tramontane.evaluate("tiny", rows, samples=2, temperature=0, max_tokens=4)


def malformed(reason: str, text: str = "5", finish: str = "stop") -> dict[str, str]:
    row = {"verdict": "malformed", "reason": reason, "problem": "2 + 3?", "text": text}
    return row | {"finish_reason": finish}


def test_a_malformed_result_is_explained() -> None:
    rows = [malformed("does not start with <think>", "It is 5.")] * 3
    rows += [malformed("no </think>", finish="length"), {"verdict": "right"}]
    found = Malformed.of(rows)
    assert found.reasons == {"does not start with <think>": 3, "no </think>": 1}
    text = "\n".join(found.explain(5))
    assert "4 of 5 completions lack the format" in text
    assert "3  does not start with <think>" in text
    assert "1  of them were cut off" in text
    assert "│ It is 5." in text
    assert "data.system_prompt=magistral" in text and "tramontane sft" in text


def test_a_well_formed_result_needs_no_explanation() -> None:
    assert Malformed.of([{"verdict": "right"}]).explain(1) == []
    assert Malformed.of([malformed("no </think>")] + [{"verdict": "right"}] * 3).explain(4) == []
    cut_off = malformed("no </think>", finish="length")
    assert "pipeline.l_max" in str(Malformed.of([cut_off]).explain(1))
    assert "pipeline.l_max" not in str(Malformed.of([malformed("no </think>")]).explain(1))
    assert "schema" in str(
        Malformed.of([malformed("JSON does not fit the schema at $")]).explain(1)
    )


def test_a_config_in_python_is_read_like_its_file(tmp_path: Path) -> None:
    """Keys that it does not set are those of an evaluation, not of a training."""
    (file := tmp_path / "config.yaml").write_text("data:\nevaluation: {samples: 2}\n")
    given = Config.model_validate({"evaluation": {"samples": 2}})
    of_file, of_python = (settings_for("tiny", "playground:", c, [], {}) for c in (file, given))
    assert of_file.sampling == of_python.sampling
    assert of_python.sampling.max_tokens == 512


def test_evaluation_problems_do_not_change_with_the_seed():
    def asked(seed):
        data = {"train": "playground:", "eval": "playground:"}
        config = Config(seed=seed, data=data, evaluation={"problems": 20})
        given = read_input(config)
        stream = given.problems.streams[0]
        held_out = [problem.id for problem in given.sets["held_out"].problems]
        settings = settings_for("tiny", None, config, [], {"seed": seed})
        evaluated = [problem.id for problem in problems_of(settings)]
        return held_out, evaluated, [stream.next().id for _ in range(20)]

    (run, alone, trained), (other_run, other_alone, other_trained) = asked(0), asked(1)
    assert run == other_run == alone == other_alone
    assert trained != other_trained
