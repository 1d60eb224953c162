"""A vision tower that is trained with the policy: its gradients are those of the whole model, and
what was trained reaches generators, files and the parent."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForImageTextToText

from tests.models.test_vision import by_processor, encoder_of, half_of, predicted, seen, vision_of
from tests.pictures import uri
from tests.runs import small_config
from tests.vision import write_wrapper
from tramontane.batches import BatchSettings, TrainBatch, TrainSequence
from tramontane.config import GeneratorConfig, TeacherConfig, TrainerConfig
from tramontane.errors import InputError
from tramontane.generator.generator import Generator
from tramontane.models.image_tokens import FAMILIES
from tramontane.models.loading import load_model
from tramontane.models.transplant import transplant
from tramontane.models.vision import Vision
from tramontane.models.weights import LocalWeights
from tramontane.run.prepare import prepare
from tramontane.tokens import ints
from tramontane.trainer.head import plain_predictions
from tramontane.trainer.rows import pack_row
from tramontane.trainer.teacher import Teacher
from tramontane.trainer.trainer import Trainer
from tramontane.types import Completion, Illustrated, SamplingParams

TOKENS = [70, 71, 72, 73]


@pytest.fixture(scope="module", params=FAMILIES)
def wrapper(request: Any, tmp_path_factory: Any) -> tuple[Any, str]:
    folder = tmp_path_factory.mktemp(request.param)
    return write_wrapper(folder, request.param), str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> str:
    """A Mistral 3."""
    found = tmp_path_factory.mktemp("mistral3")
    write_wrapper(found, "mistral3")
    return str(found)


def config_of(vision: str = "all", **keys: Any) -> TrainerConfig:
    return TrainerConfig.model_validate(
        {"vision": vision, "learning_rate": 1e-2, "dtype": "float32", **keys}
    )


def sequence_of(folder: str, image: str, reward: float = 0.0) -> TrainSequence:
    ids = encoder_of(folder).encode(Illustrated("What?", [image]))
    return TrainSequence(
        array("i", ids), ints(TOKENS), [-5.0] * 4, [0] * 4, reward=reward, images=(image,)
    )


def batch_of(folder: str) -> TrainBatch:
    groups = []
    for seed in (0, 1):
        group = [sequence_of(folder, uri(seed=seed), float(i)) for i in range(2)]
        group[1].token_ids[0] += 1
        groups.append(group)
    return TrainBatch(0, groups, BatchSettings("", 1.0, l_max=8, n_minibatch=4))


def tower_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    assert trainer.vision is not None
    return {n: p.detach().clone() for n, p in trainer.vision._tower.named_parameters()}


def test_gradients_are_those_of_the_whole_model(wrapper: tuple[Any, str]) -> None:
    whole, folder = wrapper
    image = uri()
    row = pack_row([sequence_of(folder, image)], torch.device("cpu"))
    vision, half = Vision(folder), half_of(folder)
    trained = vision.train("all")
    with vision.entering(half, row.pictured, row.inputs) as inputs:
        plain_predictions(half, replace(row, inputs=inputs), 1.0).logprobs.sum().backward()
    made = by_processor(folder, Illustrated("What?", [image]), [image])
    whole.zero_grad()
    predicted(whole, made, TOKENS).sum().backward()
    expected = {name: p.grad for name, p in whole.model.named_parameters()}
    reached = 0
    for name, weight in trained.items():
        if weight.grad is None:  # of what features are not made of, such as the last layer's norm
            assert expected[name] is None or not expected[name].any(), name
            continue
        reached += 1
        torch.testing.assert_close(weight.grad, expected[name], atol=1e-4, rtol=1e-3, msg=name)
    assert reached > len(trained) / 2


def test_a_teacher_scores_what_the_whole_model_sees(wrapper: tuple[Any, str]) -> None:
    whole, folder = wrapper
    teacher = Teacher.load(folder, TeacherConfig(model=folder, dtype="float32"), 1000, 2, 320)
    images = [uri(), uri(seed=1)]
    scores = teacher.score([sequence_of(folder, image) for image in images], 1.0)
    for image, found in zip(images, scores, strict=True):
        made = by_processor(folder, Illustrated("What?", [image]), [image])
        with torch.no_grad():
            expected = predicted(whole, made, TOKENS)
        torch.testing.assert_close(torch.tensor(found.logprobs), expected, atol=1e-4, rtol=0)
    assert abs(scores[0].logprobs - scores[1].logprobs).max() > 1e-2  # it sees them


def test_every_family_has_a_projector(wrapper: tuple[Any, str]) -> None:
    """It is a part of what is trained, and nothing for sound is."""
    vision = Vision(wrapper[1])
    projector, every = set(vision.train("projector")), set(vision.train("all"))
    assert projector and projector < every
    assert not [name for name in every if "audio" in name]


@pytest.mark.parametrize("what", ["frozen", "projector", "all"])
def test_what_is_named_is_trained_and_nothing_else(folder: str, what: str) -> None:
    trainer = Trainer.load(folder, config_of(what), 3)
    before = tower_of(trainer)
    trainer.step(batch_of(folder))
    moved = {name for name, new in tower_of(trainer).items() if not torch.equal(new, before[name])}
    projector = {name for name in before if "projector" in name}
    assert projector
    assert projector != set(before)
    if what == "all":
        assert moved >= projector
        assert moved - projector
    else:
        assert moved == (projector if what == "projector" else set())


def test_its_learning_rate_is_its_own(folder: str) -> None:
    """AdamW's first step is as large as the learning rate."""
    for rate in (None, 1e-4):
        trainer = Trainer.load(folder, config_of(vision_learning_rate=rate), 3)
        before = tower_of(trainer)
        trainer.step(batch_of(folder))
        steps = [(new - before[name]).abs().max() for name, new in tower_of(trainer).items()]
        assert float(max(steps)) == pytest.approx(rate or 1e-3, rel=0.01)


def test_generators_see_with_the_new_tower(folder: str) -> None:
    image = uri()
    trainer = Trainer.load(folder, config_of(), 3)
    prompt = encoder_of(folder).encode(Illustrated("What?", [image]))
    config = GeneratorConfig(dtype="float32")
    generator = Generator.load(folder, config, 1, len(prompt) + 8)
    for version in (1, 2):
        trainer.step(batch_of(folder))
        generator.fetch(version, trainer.publish(LocalWeights()))
        assert generator.swap(version) > 0
        request = Completion.requested(version, 0, prompt, 0, SamplingParams(4), images=[image])
        generator.submit([request])
        [completion] = generator.step(5)
        sequence = TrainSequence(
            array("i", prompt), completion.token_ids, completion.logprobs, completion.versions,
            images=(image,),
        )  # fmt: skip
        found = torch.tensor(trainer.logprobs([sequence], 1.0)[0])
        expected = torch.tensor(completion.logprobs)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
        trainer.vision = vision_of(folder)  # the tower as it was
        old = torch.tensor(trainer.logprobs([sequence], 1.0)[0])
        assert (old - expected).abs().max() > 1e-3
        trainer.vision = trainer._tower._vision  # type: ignore[union-attr]


def test_a_frozen_tower_keeps_its_features_over_updates(folder: str) -> None:
    image = uri()
    trainer = Trainer.load(folder, config_of("frozen"), 3)
    generator = Generator.load(folder, GeneratorConfig(dtype="float32"), 1, 64)
    vision = generator._engine.vision
    assert vision is not None
    features = vision.features(image)
    generator.fetch(1, trainer.publish(LocalWeights()))
    assert generator.swap(1) > 0
    assert vision.features(image) is features


def test_it_is_saved_with_the_text_half_and_put_into_the_parent(folder: str, tmp_path: Any) -> None:
    image = uri()
    trainer = Trainer.load(folder, config_of(), 3)
    trainer.step(batch_of(folder))
    assert trainer.vision is not None
    features = trainer.vision.features(image).embedded.detach()
    trainer.save_weights(tmp_path / "weights")
    again = Vision(str(tmp_path / "weights"))
    torch.testing.assert_close(again.features(image).embedded, features)
    assert (vision_of(folder).features(image).embedded - features).abs().max() > 1e-3
    row = pack_row([sequence_of(folder, image)], torch.device("cpu"))
    half = load_model(str(tmp_path / "weights"))
    torch.testing.assert_close(
        seen(again, half, row),
        torch.tensor(trainer.logprobs([sequence_of(folder, image)], 1.0)[0]),
        atol=1e-5, rtol=0,
    )  # fmt: skip
    found = transplant(str(tmp_path / "weights"), folder, tmp_path / "whole")
    whole = AutoModelForImageTextToText.from_pretrained(found.out)
    parameters = dict(whole.model.named_parameters())
    for name, weight in tower_of(trainer).items():
        assert torch.equal(parameters[name], weight), name


def test_a_state_goes_on_with_the_tower(folder: str, tmp_path: Any) -> None:
    trainer = Trainer.load(folder, config_of(), 5)
    trainer.step(batch_of(folder))
    trainer.save_state(tmp_path)
    trainer.step(batch_of(folder))
    again = Trainer.load(folder, config_of(), 5)
    again.load_state(tmp_path)
    again.step(batch_of(folder))
    for name, weight in tower_of(again).items():
        assert torch.equal(weight, tower_of(trainer)[name]), name


def test_a_text_model_has_no_tower_to_train() -> None:
    with pytest.raises(InputError, match="takes no images"):
        Trainer.load("tiny", config_of(), 3)


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"placement": {"kind": "process"}}, r"placement\.kind"),
        ({"trainer": {"ranks": 2}}, r"trainer\.ranks"),
        ({"trainer": {"threads": 2}}, r"trainer\.threads"),
        ({"generator": {"kind": "vllm"}}, r"generator\.kind"),
        ({"trainer": {"objective": {"magistral": {"kl_coef": 0.1}}}}, r"trainer\.objective"),
    ],
)
def test_where_a_tower_is_not_trained_is_said(tmp_path: Any, sections: Any, key: str) -> None:
    small_config(tmp_path, **sections)
    sections["trainer"] = {"vision": "all", **sections.get("trainer", {})}
    with pytest.raises(ValidationError, match=key):
        small_config(tmp_path, **sections)


def test_rows_without_images_train_no_tower(tmp_path: Any) -> None:
    config = small_config(tmp_path, trainer={"vision": "projector"}, model="tiny_vision")
    with pytest.raises(InputError, match="rows with images"):
        prepare(config)
