"""Loaders that are given a model that they do not know."""

import pytest

from tests.models.test_families import saved
from tramontane.cli import app
from tramontane.config import TeacherConfig, TrainerConfig
from tramontane.errors import InputError
from tramontane.models.loading import load_tokenizer
from tramontane.trainer import Trainer
from tramontane.trainer.teacher import Teacher


def test_trainer_and_teacher_refuse_it_at_load(tmp_path):
    path = saved(tmp_path, "bloom", n_head=4)
    with pytest.raises(InputError, match="than for each alone"):
        Trainer.load(path, TrainerConfig(dtype="float32"), 1)
    with pytest.raises(InputError, match="than for each alone"):
        Teacher.load(path, TeacherConfig(model=path), 64, 0, 96)


COMMANDS = {
    "train": ["run.yaml"],
    "train --dry-run": ["run.yaml"],
    "train, a teacher": [
        "run.yaml",
        "model=tiny",
        "teacher.model=model",
        "trainer.objective.name=distill",
        "pipeline.diversity=none",
    ],
    "sft": ["sft.yaml"],
    "eval": ["model", "rows.jsonl"],
    "generate": ["model", "1 + 1?"],
    "serve": ["model"],
    "plan": ["model=model", "gpus=2"],
    "doctor --chat": ["model"],
    "extract": ["model", "out"],
}
FILES = {
    "run.yaml": '{name: x, model: model, run_dir: run, data: {train: "playground:", eval: null}}',
    "sft.yaml": "{model: model, output: out, data: {train: rows.jsonl}}",
    "rows.jsonl": '{"problem": "1 + 1?", "answer": "2", "prompt": "1 + 1?", "response": "2"}',
    "model/config.json": '{"model_type": "none_such"}',
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_an_architecture_in_one_line(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    load_tokenizer("tiny").save_pretrained("model")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    before = {*tmp_path.rglob("*")}
    with pytest.raises(InputError, match=r"model 'model': cannot be loaded .*`none_such`") as error:
        app([*command.partition(",")[0].split(), *COMMANDS[command]], standalone_mode=False)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500
    assert {*tmp_path.rglob("*")} == before
