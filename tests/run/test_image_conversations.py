"""Whole runs whose environments show images, in first prompts and behind turns."""

import json
import signal
import string

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests import forked
from tests.controller.test_pipeline import rollouts, weights
from tests.generator.test_image_lives import stacked
from tests.run.galleries import LARGE, SMALL
from tests.run.test_conversations import under_way
from tests.run.test_images import given as given
from tests.run.test_images import settings
from tramontane.data.images import as_text, image_name
from tramontane.models.image_tokens import ImageProcessor
from tramontane.models.images import data_uri
from tramontane.run.changes import open_run
from tramontane.run.columns import sampled_of
from tramontane.run.screen import QuietScreen
from tramontane.run.train import train
from tramontane.tokens import INSERTED

# Environments that show images need torch.
pytestmark = pytest.mark.usefixtures("forked_workers")
IMAGE_TOKEN = 259  # of the tiny Mistral 3


def shown_in_turns(given, out, environment="Gallery", **keys):
    data = {
        "train": str(given / "rows.jsonl"), "eval": str(given / "rows.jsonl"),
        "system_prompt": None, "eval_overlap": "ignore",
        "environment": f"tests.run.galleries:{environment}",
    }  # fmt: skip
    data |= keys.pop("data", {})
    pipeline = {
        "updates": 3, "group_size": 4, "n_batch": 8, "n_async": 8, "l_max": 160, "l_cache": 0,
        "diversity": "none",
    }  # fmt: skip
    pipeline |= keys.pop("pipeline", {})
    generator = {"dtype": "float32", "stop": list(string.ascii_letters)}
    return settings(
        given, out, data=data, pipeline=pipeline, generator=generator,
        checkpoint={"every": 1}, conversation={"replay": True, "step_timeout": 300}, **keys
    )  # fmt: skip


def mismatches(run):
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["mismatch_age_0"] for row in metrics if "mismatch_age_0" in row]


@pytest.mark.slow
def test_a_run_whose_environment_shows_images_is_killed_and_resumed(given, tmp_path):
    whole, cut = (
        shown_in_turns(given, tmp_path / name, pipeline={"max_staleness": 0}, data={"eval": None})
        for name in ("whole", "cut")
    )
    train(whole, QuietScreen())
    killed = forked.start(forked.train_killed_at, cut.model_dump_json(), 2)
    assert forked.end(killed) == -signal.SIGKILL
    folder, config = open_run(tmp_path / "cut")
    train(config, QuietScreen(), folder)
    one, other = (weights(tmp_path / name, 3) for name in ("whole", "cut"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    found = rollouts(tmp_path / "whole")
    assert [r["token_ids"] for r in found] == [r["token_ids"] for r in rollouts(tmp_path / "cut")]
    ages = mismatches(tmp_path / "whole")
    assert ages and max(ages) < 1e-4  # trainer and generators see the same
    files = {file.name for file in (tmp_path / "whole" / "images").iterdir()}
    seen = 0
    for row in found:
        put = [m["image_files"] for turn in row["turns"] for m in turn["messages"]]
        assert all(len(names) == 1 and names[0] in files for names in put)
        assert row["images"] == 1 + len(put) and {*row["image_files"]} <= files
        assert all("Now <image>what?" in m["content"] for t in row["turns"] for m in t["messages"])
        image_tokens = [i for i, token in enumerate(row["token_ids"]) if token == IMAGE_TOKEN]
        seen += sum(row["versions"][i] == INSERTED for i in image_tokens)
    assert seen > 100


@pytest.mark.slow
def test_conversations_under_way_keep_their_images_through_a_kill(given, tmp_path):
    sizes = {"n_async": 24, "updates": 4, "max_staleness": 6}
    still = {"dtype": "float32", "learning_rate": 1e-12}  # kept keys and values are those of now
    keys = {"pipeline": sizes, "trainer": still, "data": {"eval": None}}  # which would wait too
    config = shown_in_turns(given, tmp_path, "SlowGallery", **keys)
    killed = forked.start(forked.train_killed_at, config.model_dump_json(), 2)
    assert forked.end(killed) == -signal.SIGKILL
    newest = max((tmp_path / "checkpoints").glob("update_[0-9]"))
    known = under_way(newest)
    assert any(request.put_images for request in known.values())
    for request in known.values():
        assert len(request.images) == (1 if request.prompt_ids else 0)
        put = [i for t in request.turns if t.end < len(request.token_ids) for i in t.images]
        assert request.put_images == put
    (tmp_path / "go").touch()
    folder, config = open_run(tmp_path)
    train(config, QuietScreen(), folder)
    ages = mismatches(tmp_path)
    assert ages and max(ages) < 1e-4


@pytest.mark.slow
def test_a_run_whose_harness_shows_images_samples_what_the_whole_model_does(given, tmp_path):
    pytest.importorskip("fastapi", reason="not installed: pip install 'tramontane-rl[view]'")
    still = {"dtype": "float32", "learning_rate": 1e-12}
    keys = {"pipeline": {"updates": 2, "l_max": 200}, "trainer": still}
    train(shown_in_turns(given, tmp_path, "Painter", **keys), QuietScreen())
    ages = mismatches(tmp_path)
    assert ages and max(ages) < 1e-4
    whole = AutoModelForImageTextToText.from_pretrained(given / "model")
    processor, forks = ImageProcessor(str(given / "model")), 0
    for row in rollouts(tmp_path):
        assert row["ending"] == "completed", row["ending_reason"]
        [name] = row["image_files"]
        first = data_uri((tmp_path / "images" / name).read_bytes())
        others = [as_text(LARGE), as_text(SMALL)]
        kept = {file.name for file in (tmp_path / "images").iterdir()}
        assert {*map(image_name, others)} <= kept
        earlier = [each | sampled_of(each) for each in row["earlier"] or ()]
        sequences = [*earlier, row]
        forks += len(sequences) - 1
        for sequence in sequences:
            ids = [*sequence["prompt_ids"], *sequence["token_ids"]]
            put = zip(sequence["token_ids"], sequence["versions"], strict=True)
            given_ids = [*sequence["prompt_ids"], *(t for t, v in put if v == INSERTED)]
            count = given_ids.count(IMAGE_TOKEN)
            sizes = [processor.expansion(image).count("[IMG]") for image in (first, *others)]
            shown = next(
                images
                for images in ([first, *others], [first, others[0]], [first], [others[1]])
                if sum(sizes[[first, *others].index(i)] for i in images) == count
            )
            if ids.count(IMAGE_TOKEN) > count:
                continue  # the model drew one itself, which stands for none
            made = [processor.inputs(image) for image in shown]
            names = "pixel_values", "image_sizes"
            inputs = {name: stacked([each[name] for each in made]) for name in names}
            with torch.no_grad():
                found = whole(input_ids=torch.tensor([ids]), **inputs).logits[0]
            n = len(sequence["token_ids"])
            drawn = torch.tensor(ids)[-n:, None]
            wanted = found[-n - 1 : -1].log_softmax(-1).gather(1, drawn)[:, 0]
            own = torch.tensor(sequence["versions"]) != INSERTED
            logprobs = torch.tensor(sequence["logprobs"])
            torch.testing.assert_close(logprobs[own], wanted[own], atol=1e-4, rtol=0)
    assert forks
