"""Runs, evaluations and prompts on images, with a tiny Mistral 3 whose rewards need its eyes."""

import json
import shutil
import signal
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForImageTextToText
from typer.testing import CliRunner

import tramontane
from tests.pictures import picture, uri
from tests.runs import small_config
from tests.vision import write_wrapper
from tramontane.cli import app
from tramontane.config import Config, ObjectiveConfig
from tramontane.config.generator import InterruptionConfig
from tramontane.config.judge import JudgeConfig
from tramontane.controller.images import check_images, unsupported
from tramontane.errors import InputError
from tramontane.evaluation.checkpoint import encoder_of
from tramontane.models.transplant import transplant
from tramontane.run.rollouts import files, read_rollouts
from tramontane.types import Problem

EVEN = {"function": "tests.run.rewards.even", "malformed": True}


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A wrapper, and rows with an image each."""
    folder = tmp_path_factory.mktemp("images")
    write_wrapper(folder / "model")
    rows = []
    for number in range(6):
        picture(30 + number, 30, seed=number).save(folder / f"{number}.png")
        rows.append({"problem": "How many?", "answer": f"{number}", "image": f"{number}.png"})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def settings(given, out, **keys):
    data = {"train": str(given / "rows.jsonl"), "eval": str(given / "rows.jsonl")}
    data |= {"system_prompt": None, "eval_overlap": "ignore"}
    base = {
        "model": str(given / "model"),
        "data": data,
        "pipeline": {
            "updates": 3, "group_size": 4, "n_batch": 8, "n_async": 8, "l_max": 8, "l_cache": 0,
            "max_staleness": 0,
        },
        "generator": {"dtype": "float32"},
        "trainer": {"dtype": "float32", "learning_rate": 1e-3},
        "evaluation": {"problems": 2, "samples": 1},
        "verifier": {"reward": {"custom": [EVEN]}},
        "rollouts": "all",
    }  # fmt: skip
    return small_config(out, **{**base, **keys})


def train(config=None, stop_after=0, **keys):
    def stop(metrics):
        if metrics["update"] == stop_after:
            signal.raise_signal(signal.SIGINT)

    return tramontane.train(config, quiet=True, report=False, on_update=stop, **keys)


@pytest.mark.slow
def test_a_run_on_images_is_resumed_evaluated_and_goes_back_into_its_parent(given, tmp_path):
    out = tmp_path / "run"
    whole = train(settings(given, tmp_path / "whole"))
    assert whole.finished
    assert not train(settings(given, out), stop_after=1).finished
    assert train(resume=out).finished

    def sampled(run):
        return [
            list(row["token_ids"])
            for file in files(run / "rollouts")
            for row in read_rollouts(file, ["token_ids"])
        ]

    assert sampled(out) == sampled(tmp_path / "whole")  # nothing was lost or sees otherwise
    measured = [
        json.loads(line) for line in (out / "evaluation_after.jsonl").read_text().splitlines()
    ]
    for row in [*measured, *read_rollouts(files(out / "rollouts")[0])]:
        assert row["image_tokens"] == [12]
        assert (out / "images" / row["image_files"][0]).is_file()
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    ages = [row["mismatch_age_0"] for row in metrics if "mismatch_age_0" in row]
    assert ages and max(ages) < 1e-4  # trainer and generators see the same
    as_data = {"train": "playground:", "trajectories": {"sources": [str(out)]}}
    config = small_config(tmp_path / "again", model=str(given / "model"), data=as_data)
    with pytest.raises(InputError, match="has an image, and"):
        train(config)
    weights = max((out / "checkpoints").glob("update_*")) / "weights"
    result = tramontane.evaluate(weights)
    assert result.n_problems == 2
    transplant(str(weights), str(given / "model"), tmp_path / "whole_model")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "whole_model")
    assert type(model).__name__ == "Mistral3ForConditionalGeneration"
    tower = AutoModelForImageTextToText.from_pretrained(given / "model")
    for name, tensor in tower.named_parameters():
        same = torch.equal(tensor, model.get_parameter(name))
        assert same == ("language_model" not in name and "lm_head" not in name), name


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_workers_on_ray_see_what_the_trainer_sees(given, tmp_path):
    placement = {"kind": "ray"}
    assert train(settings(given, tmp_path / "run", placement=placement)).finished
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ages = [row["mismatch_age_0"] for row in map(json.loads, lines) if "mismatch_age_0" in row]
    assert len(ages) == 3 and max(ages) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_5", "gemma4", "llava_next"])
def test_a_family_is_trained_with_adapters_and_resumed(tmp_path, kind):
    """Adapters, their merged weights, a resumed run, an evaluation and the way back, where an image
    changes more than embeddings."""
    write_wrapper(tmp_path / "model", kind)
    rows = [{"problem": "How many?", "answer": f"{n}", "image": uri(seed=n)} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out, trainer = tmp_path / "run", {"dtype": "float32", "learning_rate": 1e-2}
    config = settings(tmp_path, out, trainer=trainer | {"lora": {"rank": 4}})
    assert not train(config, stop_after=1).finished
    assert train(resume=out).finished
    lines = (out / "metrics.jsonl").read_text().splitlines()
    ages = [row["mismatch_age_0"] for row in map(json.loads, lines) if "mismatch_age_0" in row]
    assert ages and max(ages) < 1e-4
    weights = max((out / "checkpoints").glob("update_*")) / "weights"
    assert tramontane.evaluate(weights).n_problems == 2
    transplant(str(weights), str(tmp_path / "model"), tmp_path / "whole")
    before, after = (
        AutoModelForImageTextToText.from_pretrained(tmp_path / name) for name in ("model", "whole")
    )
    changed = {
        name
        for name, tensor in before.named_parameters()
        if not torch.equal(tensor, after.get_parameter(name))
    }
    assert changed and all("language_model" in name for name in changed)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("how", [{"lora": {"rank": 4}}, {"ranks": 2}])
def test_adapters_and_ranks_train_on_images(given, tmp_path, how):
    trainer = {"dtype": "float32", "learning_rate": 1e-2, **how}
    assert train(settings(given, tmp_path / "run", trainer=trainer)).finished
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ages = [row["mismatch_age_0"] for row in map(json.loads, lines) if "mismatch_age_0" in row]
    assert len(ages) == 3 and max(ages) < 1e-4


@pytest.mark.slow
def test_a_teacher_that_sees_is_learned_from(given, tmp_path):
    """The policy itself at first: without images, its distance would not be 0."""
    objective = {"name": "distill", "distill": {"top_k": 4}}
    pipeline = settings(given, tmp_path / "run").pipeline.model_dump(exclude_unset=True)
    config = settings(
        given,
        tmp_path / "run",
        pipeline=pipeline | {"diversity": "none"},
        trainer={"dtype": "float32", "learning_rate": 1e-3, "objective": objective},
        teacher={"model": str(given / "model"), "dtype": "float32"},
    )
    assert train(config).finished
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["teacher_divergence"] == pytest.approx(0, abs=1e-4)


def test_a_teacher_that_does_not_see_the_same_is_refused(given, tmp_path):
    encoder = encoder_of(Config(model=str(given / "model")))
    problem = Problem("a", "math", "What?", "1", images=(uri(picture(60, 30)),))
    objective = {"trainer": {"objective": {"name": "distill"}}, "pipeline": {"diversity": "none"}}

    def taught(model):
        return Config(teacher={"model": str(model)}, **objective)

    check_images(taught(given / "model"), encoder, [problem], compiled=False)
    check_images(taught("tiny"), encoder, [problem])  # an evaluation asks no teacher
    says = "problem 'a': has an image, and the teacher would not see it: .*takes no images"
    with pytest.raises(InputError, match=says):
        check_images(taught("tiny"), encoder, [problem], compiled=False)
    shutil.copytree(given / "model", tmp_path / "other")
    file = tmp_path / "other" / "preprocessor_config.json"
    kept = json.loads(file.read_text())
    file.write_text(json.dumps(kept | {"size": {"longest_edge": 28}}))
    says = r"problem 'a': its image takes 2 tokens \[IMG\] of teacher .*, and 8 \[IMG\] of"
    with pytest.raises(InputError, match=says):
        check_images(taught(tmp_path / "other"), encoder, [problem], compiled=False)


def test_vllm_takes_families_whose_images_change_embeddings_alone(given, tmp_path):
    config = Config(generator={"kind": "vllm"})
    assert not [*unsupported(config, encoder_of(Config(model=str(given / "model"))).images, None)]
    write_wrapper(tmp_path, "qwen2_vl")
    images = encoder_of(Config(model=str(tmp_path))).images
    assert [key for key, _ in unsupported(config, images, None)] == ["generator.kind"]


def test_a_dry_run_says_what_an_image_takes(given, tmp_path):
    result = tramontane.dry_run(settings(given, tmp_path / "run"))
    assert result.lines["images"] == "the first takes 12 tokens"


def test_a_drawn_playground_is_refused_by_a_model_without_eyes(tmp_path):
    config = small_config(tmp_path / "run", data={"playground": {"kinds": ["sums", "drawn_bars"]}})
    with pytest.raises(InputError, match="takes no images"):
        train(config)


@pytest.mark.slow
def test_generate_with_an_image(given):
    arguments = [
        "generate",
        str(given / "model"),
        "What?",
        "--temperature",
        "0",
        "--max-tokens",
        "6",
    ]
    texts = []
    for number in (0, 1):
        image = str(given / f"{number}.png")
        result = CliRunner().invoke(app, [*arguments, "--image", image])
        assert result.exit_code == 0, result.output
        texts.append(result.stdout)
    assert texts[0] != texts[1]
    result = CliRunner().invoke(app, [*arguments, "--image", str(given / "none.png")])
    assert isinstance(result.exception, InputError) and "no such file" in str(result.exception)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"trainer": {"ranks": 2, "context_parallel": 2}}, "trainer.context_parallel"),
        ({"model": "tiny"}, "takes no images"),
    ],
)
def test_what_takes_no_images_is_refused_at_the_start(given, tmp_path, keys, says):
    config = settings(given, tmp_path / "run", **keys)
    with pytest.raises(InputError, match=rf"{says}"):
        train(config)


def test_compiled_layers_of_a_model_whose_images_enter_several_are_refused(tmp_path):
    write_wrapper(tmp_path / "model", "qwen3_vl")
    encoder = encoder_of(Config(model=str(tmp_path / "model")))
    problem = Problem("a", "math", "What?", "1", images=(uri(picture(30, 30)),))
    with pytest.raises(InputError, match=r"\(generator.compile\)"):
        check_images(Config(generator={"device": "cuda"}), encoder, [problem])
    config = Config(generator={"device": "cuda", "compile": False})
    with pytest.raises(InputError, match=r"\(trainer.compile\)"):
        check_images(config, encoder, [problem], compiled=True)
    check_images(config, encoder, [problem], compiled=False)


def test_what_only_a_trainer_refuses_does_not_concern_an_evaluation(given):
    encoder = encoder_of(Config(model=str(given / "model")))
    problem = Problem("a", "math", "What?", "1", images=(uri(picture(30, 30)),))
    config = Config(trainer={"ranks": 2, "context_parallel": 2})
    check_images(config, encoder, [problem])
    says = r"problem 'a': has an image, and ranks that share rows take none yet \(trainer\.context"
    with pytest.raises(InputError, match=says):
        check_images(config, encoder, [problem], compiled=False)
    blind = encoder_of(Config(model="tiny"))
    with pytest.raises(InputError, match="'tiny': it takes no images"):
        check_images(Config(), blind, [problem])
    torn = replace(problem, images=("data:image/png;base64,AAAA",), where="row 3")
    with pytest.raises(InputError, match="row 3: "):
        check_images(Config(), encoder, [torn])
    vision = {"vision": "all", "dtype": "float32"}
    trained, without = Config(trainer=vision), [replace(problem, images=())]
    check_images(trained, encoder, [*without, problem], compiled=False)
    check_images(trained, encoder, without)
    check_images(Config(), encoder, without, compiled=False)
    with pytest.raises(InputError, match=r"^trainer\.vision: all trains on images, and the rows"):
        check_images(trained, encoder, without, compiled=False)


def test_judges_that_would_not_see_are_refused(given):
    """Endpoints are asked about the first row; what tools show is not shown to a judge."""
    encoder = encoder_of(Config(model=str(given / "model")))
    problem = Problem("a", "open", "What?", images=[uri(picture(30, 30))])

    def judging(**model):
        judge = {"rubric": ["It is kind."], **model}
        return Config(verifier={"judge": judge, "domains": {"open": {"verifier": "judge"}}})

    check_images(judging(checkpoint={"path": str(given / "model")}), encoder, [problem])
    with pytest.raises(InputError, match="the judge would not see it.*takes no images"):
        check_images(judging(checkpoint={"path": "tiny"}), encoder, [problem])
    endpoint = judging(endpoint={"url": "http://x", "model": "m"})
    check_images(endpoint, encoder, [problem])
    assert "verifier.judge" in dict(unsupported(endpoint, None, None))


def test_all_that_takes_no_images_yet_is_named(tmp_path):
    write_wrapper(tmp_path / "model", "qwen3_vl")
    images = encoder_of(Config(model=str(tmp_path / "model"))).images
    plain = Config()
    config = plain.model_copy(
        update={
            "generator": plain.generator.model_copy(
                update={
                    "kind": "vllm",
                    "device": "cuda",
                    "interruption": InterruptionConfig(after=(4, 4)),
                }
            ),
            "trainer": plain.trainer.model_copy(
                update={"context_parallel": 2, "objective": ObjectiveConfig(name="dro")}
            ),
            "verifier": plain.verifier.model_copy(
                update={"judge": JudgeConfig(reward_model={"path": "tiny"})}
            ),
            "cold_start": "cold",
            "data": plain.data.model_copy(update={"trajectories": "rows"}),
        }
    )
    sampled = {
        "generator.compile": "compiled layers of its model",
        "generator.kind": "vLLM's generators, for a family whose images change more than "
        "embeddings,",
        "generator.interruption": "interrupted thoughts",
        "verifier.judge": "reward models",
    }
    trained = {
        "trainer.compile": "compiled layers of its model",
        "trainer.context_parallel": "ranks that share rows",
        "trainer.objective": "value networks",
        "cold_start": "cold starts",
        "data.trajectories": "recorded completions",
    }
    assert dict(unsupported(config, images, None)) == sampled
    assert dict(unsupported(config, images, True)) == sampled | trained
    assert [*unsupported(plain, images, True)] == [("trainer.compile", trained["trainer.compile"])]
