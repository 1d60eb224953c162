"""Judges that are models on this machine: a checkpoint that is asked, and a reward model."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    XLNetConfig,
    XLNetForSequenceClassification,
)

from tests.data.chat_templates import make_tokenizer
from tests.pictures import uri
from tests.verifier.test_judge import JUDGED, judged
from tests.vision import write_wrapper
from tramontane import InputError
from tramontane.asking import Prompt
from tramontane.asking.checkpoint import Checkpoint
from tramontane.asking.classifier import Classifier, encode, saturated, standardized
from tramontane.config import VerifierConfig, parse
from tramontane.config.judge import JudgeConfig, RewardModelConfig
from tramontane.models.loading import load_tokenizer
from tramontane.models.names import resolve
from tramontane.types import Problem
from tramontane.verifier.judge import Spending, transcript

PROBLEM = Problem("p", "open", "Say something nice.")


def save_classifier(folder, labels, pad):
    tokenizer = load_tokenizer("tiny")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(
        **sizes,
        vocab_size=len(tokenizer),
        num_attention_heads=2,
        num_labels=labels,
        pad_token_id=pad,
    )
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(config).eval()
    model.score.weight.data *= 50  # so that scores differ
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


@pytest.mark.parametrize(("labels", "pad"), [(1, 0), (1, None), (2, 0)])
def test_a_reward_model_scores_in_batches_as_one_by_one(tmp_path, monkeypatch, labels, pad):
    monkeypatch.setenv("TRAMONTANE_CPU_DTYPE", "float32")
    model, tokenizer = save_classifier(tmp_path, labels, pad)
    settings = {"path": str(tmp_path), "device": "cpu", "max_tokens": 60, "batch_size": 2}
    config = RewardModelConfig(**settings)
    answers = ["You are kind.", "No", "", "What a day!", "word " * 60]
    found = Classifier(config).score(PROBLEM, answers)
    expected = []
    for answer in answers[:4]:
        chat = [("user", PROBLEM.problem), ("assistant", answer)]
        messages = [{"role": role, "content": content} for role, content in chat]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        logits = model(ids).logits[0]
        expected.append((logits.sigmoid()[0] if labels == 1 else logits.softmax(0)[1]).item())
    assert found.values[:4] == pytest.approx(expected, abs=1e-5)
    assert len({round(value, 4) for value in expected}) == 4
    assert found.values[4] is None
    assert "longer than 60 tokens" in found.fault(4)
    odds = torch.tensor(expected, dtype=torch.float64).logit()
    expected = ((odds - odds.mean()) / odds.std(correction=0)).sigmoid().tolist()
    found = Classifier(RewardModelConfig(**settings, scores="standardized")).score(PROBLEM, answers)
    assert found.values[:4] == pytest.approx(expected, abs=1e-3) and found.values[4] is None


def test_an_answer_beyond_the_context_has_no_score(tmp_path):
    """Within `max_tokens`, but BERT has no positions for it."""
    tokenizer = load_tokenizer("tiny")
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=64, num_labels=1,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    settings = RewardModelConfig(path=str(tmp_path), device="cpu", batch_size=1)
    found = Classifier(settings).score(PROBLEM, ["You are kind.", "word " * 80])
    assert found.values[0] is not None and found.values[1] is None
    assert "longer than 64 tokens (its context)" in found.fault(1)


def test_logits_that_a_probability_cannot_tell_apart_have_different_scores():
    odds = torch.tensor([91.67, 109.88, torch.nan, 110.0])
    assert saturated(odds) and saturated(-odds)
    assert not saturated(torch.tensor([2.0, 4.0, 110.0])) and not saturated(odds[:1])
    scores = standardized(odds).sigmoid()
    assert scores[0] < 0.25 < 0.6 < scores[1] < scores[3] and scores[2].isnan()
    assert standardized(torch.tensor([92.0, 92.0])).tolist() == [0.0, 0.0]
    assert standardized(torch.tensor([torch.nan])).isnan().all()


def test_a_reward_model_whose_scores_depend_on_padding_takes_one_answer_at_a_time(
    tmp_path, monkeypatch
):
    """XLNet reads the score from the last place, and right padding is put there."""
    monkeypatch.setenv("TRAMONTANE_CPU_DTYPE", "float32")
    tokenizer = load_tokenizer("tiny")
    config = XLNetConfig(
        vocab_size=len(tokenizer), d_model=16, n_layer=1, n_head=2, d_inner=16, num_labels=1,
        pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    XLNetForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    settings = {"path": str(tmp_path), "device": "cpu"}
    with pytest.raises(InputError, match=r"another score beside longer.*batch_size to 1"):
        Classifier(RewardModelConfig(**settings))
    alone = Classifier(RewardModelConfig(**settings, batch_size=1))
    assert alone.score(PROBLEM, ["Yes", "No."]).values[0] == alone.score(PROBLEM, ["Yes"]).values[0]


def test_a_model_without_a_classifiers_head_is_refused():
    config = RewardModelConfig(path=resolve("tiny"), device="cpu")
    with pytest.raises(InputError, match=r"its weights lack score\.weight"):
        Classifier(config)


def test_a_checkpoint_is_asked(tmp_path):
    checkpoint = {"path": "tiny", "device": "cpu", "slots": 4}
    settings = {"checkpoint": checkpoint, "rubric": ["Kind"], "max_tokens": 8, "tries": 1}
    config = parse(VerifierConfig, {"judge": settings, "domains": JUDGED}, "config.yaml")
    found = judged(config, ["You are kind.", "No."], tmp_path, PROBLEM)
    assert found.values == [None, None]  # it has not learned to judge
    assert found.fault(0) == found.fault(1) == "judge: its answer was cut at 8 tokens (max_tokens)"
    assert Spending(tmp_path, None).requests == 2


def test_a_cross_encoder_gets_the_segments_of_a_pair(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAMONTANE_CPU_DTYPE", "float32")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "sky", "blue", "why", "is", "the", "light"]
    plain = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    plain.pre_tokenizer = Whitespace()
    plain.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain,
        pad_token="[PAD]",
        unk_token="[UNK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        num_labels=1,
        initializer_range=0.6,
    )
    model = BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    chat = [
        {"role": "user", "content": "why is the sky blue"},
        {"role": "assistant", "content": "light"},
        {"role": "user", "content": "why"},
    ]
    settings = RewardModelConfig(path=str(tmp_path), device="cpu")
    for prompt, problem in (
        ("why is the sky blue", Problem("p", "open", "why is the sky blue")),
        (transcript(chat), Problem("p", "open", "why", messages=chat)),
    ):
        answers = ["light", "the sky is blue"]
        found = Classifier(settings).score(problem, answers).values
        expected = [
            model(**tokenizer(prompt, answer, return_tensors="pt")).logits.sigmoid().item()
            for answer in answers
        ]
        assert found == pytest.approx(expected, abs=1e-5)


def test_a_reward_model_reads_a_whole_conversation():
    tokenizer = make_tokenizer("gemma")
    said = [("assistant", "I look."), ("tool", "3"), ("tool", "4"), ("assistant", "Seven.")]
    inputs = encode(tokenizer, "3 and 4?", tuple(said))
    chat = [
        {"role": "user", "content": "3 and 4?"},
        {"role": "assistant", "content": "I look."},
        {"role": "user", "content": "3\n\n4"},
        {"role": "assistant", "content": "Seven."},
    ]
    assert inputs["input_ids"] == tokenizer.apply_chat_template(chat)["input_ids"]


def test_a_reward_model_reads_the_prompt_that_an_environment_wrote():
    tokenizer = make_tokenizer("gemma")
    said = [("user", "Draft."), ("assistant", "One."), ("system", "Anew."), ("assistant", "Two.")]
    chat = [{"role": role, "content": text} for role, text in said]
    chat[2]["role"] = "user"  # templates take the system's message at the start alone
    inputs = encode(tokenizer, "3 and 4?", tuple(said))
    assert inputs["input_ids"] == tokenizer.apply_chat_template(chat)["input_ids"]
    plain = make_tokenizer("gemma")
    plain.chat_template = None
    pair = "user:\nDraft.", "assistant:\nOne.\n\nsystem:\nAnew.\n\nassistant:\nTwo."
    assert encode(plain, "3 and 4?", tuple(said))["input_ids"] == plain(*pair)["input_ids"]


def test_a_checkpoint_that_sees_is_shown_the_images(tmp_path):
    """Two images, two answers: a blind judge would give both prompts the same."""
    write_wrapper(tmp_path / "model")
    config = parse(
        JudgeConfig,
        {
            "checkpoint": {"path": str(tmp_path / "model"), "device": "cpu", "slots": 2},
            "rubric": ["Kind"], "max_tokens": 24, "temperature": 0.0, "system_prompt": None,
        },
        "config.yaml",
    )  # fmt: skip
    model = Checkpoint(config)
    shown = [(uri(seed=1),), (uri(seed=2),), ()]
    prompts = [Prompt("same", "Is it < image>?", images) for images in shown]
    found = dict(model.answers(prompts, 1, tmp_path / "answers.jsonl"))
    assert len({found[place][0].text for place in range(3)}) == 3
