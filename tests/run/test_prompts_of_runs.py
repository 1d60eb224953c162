"""Runs on models that differ from the tiny base in tags, template and stops."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import tramontane
from tests.audit.test_audit import record
from tests.data.chat_templates import make_checkpoint
from tests.runs import small_config
from tramontane.audit.audit import audit
from tramontane.config import Config, load_config
from tramontane.errors import InputError
from tramontane.evaluation.checkpoint import encoder_of
from tramontane.models.loading import load_tokenizer
from tramontane.run.folder import sealed
from tramontane.run.prepare import prepare, resolved
from tramontane.run.rollouts import read_run

SIZES = {"updates": 1, "n_batch": 16, "n_async": 16, "l_max": 24, "l_cache": 8, "diversity": "none"}


def pieces(tokenizer: Any, row: dict[str, Any]) -> list[str]:
    """The text of each sampled token."""
    return [tokenizer.decode([token]) for token in row["token_ids"]]


def run(tmp_path: Path, **sections: Any) -> list[dict[str, Any]]:
    """The rollouts of one update."""
    config = small_config(tmp_path / "run", pipeline=SIZES, **sections)
    tramontane.train(config, quiet=True, report=False)
    return list(read_run(tmp_path / "run"))


@pytest.mark.parametrize(
    ("shape", "tags", "prefix"),
    [
        pytest.param("r1-distill", ["<think>", "</think>"], "<think>\n", marks=pytest.mark.slow),
        ("magistral-1.2", ["[THINK]", "[/THINK]"], ""),
        pytest.param("base", ["<think>", "</think>"], "", marks=pytest.mark.slow),
    ],
)
def test_a_run_follows_its_models_template(
    tmp_path: Path, shape: str, tags: list[str], prefix: str
) -> None:
    model = make_checkpoint(tmp_path / "model", shape)
    found, tokenizer = run(tmp_path, model=model), load_tokenizer(model)
    assert found
    for row in found:
        assert row["text"].startswith(prefix)
        # The prefix is text of the response, but none of its tokens: nothing of it is trained.
        assert not pieces(tokenizer, row)[0].startswith("<think>")
        opened = row["text"].lstrip().startswith(tags[0])
        assert row["reason"].startswith(f"does not start with {tags[0]}") is not opened
    recorded = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert recorded["verifier"]["thinking_tags"] == tags


def test_a_prefix_and_a_stop_are_part_of_a_run(tmp_path: Path, one_layer: str) -> None:
    found = run(
        tmp_path,
        model=one_layer,
        data={"response_prefix": "<think>So, "},
        generator={"stop": ["."]},
        evaluation={"problems": 4, "samples": 2},
    )
    tokenizer = load_tokenizer("tiny")
    stopped = [row for row in found if row["finish_reason"] == "stop"]
    assert stopped
    for row in found:
        sampled = "".join(pieces(tokenizer, row)).removesuffix("</s>")
        assert row["text"] == "<think>So, " + sampled.partition(".")[0]
        assert "." not in sampled[:-1] or row["finish_reason"] == "stop"
    lines = resolved(prepare(small_config(tmp_path / "b", data={"response_prefix": "<think>"})))
    assert lines["thinking tags"] == "<think> … </think>, every response begins with '<think>'"


def test_an_audit_reads_the_tags_of_its_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "rollouts").mkdir(parents=True)
    config = {"verifier": {"thinking_tags": ["[THINK]", "[/THINK]"]}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    row = {
        "group": 0,
        "problem_id": "a",
        "answer": "7",
        "verdict": "right",
        "text": r"[THINK]It is 7.[/THINK]\boxed{7}",
    }
    record(folder / "rollouts/update_000001.parquet", [row])
    # The count of completions whose answer part has a box.
    assert audit(folder).totals["disputed"][0] == 1
    (folder / "config.yaml").unlink()
    assert audit(folder).totals["disputed"][0] == 0


def long_rows(tmp_path: Path) -> str:
    file = tmp_path / "sums.jsonl"
    statements = ["1 + " * n + "1?" for n in (2, 400, 3, 500)]
    lines = [
        json.dumps({"id": str(i), "problem": s, "answer": "3"}) for i, s in enumerate(statements)
    ]
    file.write_text("\n".join(lines))
    return str(file)


def long_config(tmp_path: Path, **data: Any) -> Config:
    file = long_rows(tmp_path)
    return small_config(
        tmp_path / "run", data={"train": file, "eval": file, "max_prompt_tokens": 200, **data}
    )


def test_a_run_refuses_prompts_above_its_limit(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'3': its prompt .*allows 200.*; 2 of 4 prompts are too"):
        prepare(long_config(tmp_path))


def test_a_run_drops_prompts_above_its_limit_on_request(tmp_path: Path) -> None:
    prepared = prepare(long_config(tmp_path, overlong_prompts="drop"))
    [stream] = prepared.problems.streams
    assert stream.problems is not None
    assert [p.id for p in stream.problems] == ["0", "2"]
    assert {stream.next().id for _ in range(4)} == {"0", "2"}
    assert [p.id for s in prepared.sets.values() for p in s.problems] == ["0", "2"]
    # The long prompts size no slot.
    assert prepared.max_prompt < 60
    assert resolved(prepared)["problems dropped"] == "4, with prompts above 200 tokens"


def test_an_endless_source_skips_prompts_above_its_limit(tmp_path: Path) -> None:
    free = prepare(small_config(tmp_path / "a"))
    lengths = {len(free.encoder.encode(free.problems.streams[0].next().problem)) for _ in range(64)}
    limit = sorted(lengths)[len(lengths) // 2]
    data = {"max_prompt_tokens": limit, "overlong_prompts": "drop"}
    prepared = prepare(small_config(tmp_path / "b", data=data))
    stream = prepared.problems.streams[0]
    taken = [len(prepared.encoder.encode(stream.next().problem)) for _ in range(64)]
    assert max(taken) <= prepared.max_prompt == limit < max(lengths)
    with pytest.raises(InputError, match=f"allows {limit}: raise it"):
        prepare(small_config(tmp_path / "c", data={"max_prompt_tokens": limit}))


def test_a_run_records_the_time_that_its_template_writes(tmp_path):
    template = tmp_path / "dated.jinja"
    template.write_text(
        "{{ bos_token }}{{ strftime_now('%H:%M:%S.%f') }}{% for m in messages %}"
        "{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    config = load_config("configs/quickstart.yaml", [f"data.chat_template={template}"])
    recorded = tmp_path / "config.yaml"
    recorded.write_text(sealed(prepare(config).config))
    texts = [encoder_of(load_config(recorded)).render("1 + 1?") for _ in range(2)]
    assert texts[0] == texts[1]
