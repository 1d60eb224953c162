"""Two models whose tokenizers differ."""

import shutil
from pathlib import Path

import pytest

from tests.run.test_distillation import DISTILL
from tests.runs import small_config
from tramontane.errors import InputError
from tramontane.models.loading import load_model, load_tokenizer
from tramontane.models.names import resolve
from tramontane.run.screen import QuietScreen
from tramontane.run.train import train


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(resolve("tiny"), other)
    file = other / "tokenizer.json"
    file.write_text(file.read_text().replace('"<think>"', '"<thought>"'))
    config = small_config(tmp_path / "run", **DISTILL | {"teacher": {"model": str(other)}})
    with pytest.raises(InputError, match=r"teacher '.*other': its tokenizer has .* not the same"):
        train(config, QuietScreen())
    config = small_config(
        tmp_path / "run", **DISTILL | {"teacher": {"model": str(tmp_path / "no")}}
    )
    with pytest.raises(InputError, match="^teacher: "):
        train(config, QuietScreen())
    padded = tmp_path / "padded"
    model = load_model("tiny")
    model.resize_token_embeddings(model.config.vocab_size + 64, mean_resizing=False)
    model.save_pretrained(padded)
    load_tokenizer("tiny").save_pretrained(padded)
    config = small_config(
        tmp_path / "run", model=str(padded), **DISTILL | {"teacher": {"model": "tiny"}}
    )
    with pytest.raises(InputError, match=r"teacher 'tiny': its output head .* 2,048 .* 2,112"):
        train(config, QuietScreen())
    assert not (tmp_path / "run").exists()
