"""A template that is given, beside the tokenizer's own."""

from pathlib import Path

from transformers import AutoTokenizer

from tests.data.test_prompts import load, with_template
from tests.run.test_prompts_of_runs import run
from tramontane.config import Config
from tramontane.data.prompts import PromptEncoder
from tramontane.evaluation.checkpoint import encoder_of
from tramontane.models.loading import load_tokenizer
from tramontane.run.folder import RunFolder


def test_a_given_template_replaces_the_tokenizers_and_is_saved_with_it(tmp_path):
    tokenizer = load_tokenizer("tiny")
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>")
    config = load(chat_template=str(file), system_prompt="Add.")
    assert config.chat_template == file.read_text()
    assert load(chat_template=config.chat_template).chat_template == file.read_text()
    own = with_template(tokenizer, "{{ messages[0].content }}")
    encoder = PromptEncoder(own, config)
    assert encoder.render("1 + 1?") == "<system>Add.<user>1 + 1?<answer>"
    own.save_pretrained(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == file.read_text()
    base = PromptEncoder(with_template(tokenizer, None), config)
    assert base.render("1 + 1?") == "<system>Add.<user>1 + 1?<answer>"


def test_whoever_uses_a_runs_weights_writes_its_prompts(tmp_path: Path, one_layer: str) -> None:
    """The run's template is saved with its weights; the model that it began with has another."""
    given = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}<answer> "
    rows = run(tmp_path, model=one_layer, data={"chat_template": given})
    [weights] = (tmp_path / "run/checkpoints").glob("*/weights")
    trained, first = (encoder_of(Config(model=name)) for name in (str(weights), one_layer))
    own = encoder_of(RunFolder(tmp_path / "run").config())
    assert own.render("1 + 1?").endswith("<user> 1 + 1?\n<answer> ")
    for row in rows:
        prompt = list(own.encode(row["problem"]))
        assert list(trained.encode(row["problem"])) == prompt
        assert list(first.encode(row["problem"])) != prompt
