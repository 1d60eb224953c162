"""Names of models: every place that takes one takes the same forms."""

from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.runs import begun, small_config
from tramontane import generate
from tramontane.config import Config, SFTConfig, parse
from tramontane.config.asking import CheckpointModel
from tramontane.config.section import Section
from tramontane.errors import InputError
from tramontane.evaluation.basis import weights_hash
from tramontane.evaluation.settings import run_of, settings_for
from tramontane.models.loading import load_config, load_model, load_tokenizer, local_folder
from tramontane.models.names import find_weights, folder_of, resolve, with_tokenizer
from tramontane.models.shape import load_shape
from tramontane.models.weight_files import WeightFiles
from tramontane.recipes.config import MediumRecipe, SmallRecipe
from tramontane.run.folder import RunFolder
from tramontane.run.prepare import prepare

TINY = Path(resolve("tiny"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def link(folder: Path, files: list[Path]) -> Path:
    folder.mkdir(parents=True)
    for file in files:
        (folder / file.name).symlink_to(file)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of updates 9, 20 and, unfinished, 30."""
    folder = begun(small_config(tmp_path / "run", data={"system_prompt": "Be brief."}))
    for name in ("update_9", "update_20"):
        link(folder.checkpoints / name / "weights", [*TINY.iterdir()])
    (folder.checkpoints / "update_30.partial" / "weights").mkdir(parents=True)
    return folder.path


def test_a_run_and_its_checkpoints_stand_for_their_weights(run: Path, tmp_path: Path) -> None:
    newest = str(run / "checkpoints/update_20/weights")
    for name in (run, run / "checkpoints", run / "checkpoints/update_20", newest):
        assert find_weights(str(name)) == newest
    assert find_weights(str(run / "checkpoints/update_9")).endswith("update_9/weights")
    for name in ("tiny", "org/name", "name", str(tmp_path / "none"), str(TINY)):
        assert find_weights(name) == name


def test_checkpoints_with_their_old_names_are_read_with_a_warning(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for checkpoint in [*(run / "checkpoints").iterdir()]:
        checkpoint.rename(checkpoint.with_name(checkpoint.name.replace("update", "step")))
    newest = run / "checkpoints/step_20"
    assert find_weights(str(run)) == find_weights(str(newest)) == str(newest / "weights")
    assert RunFolder(run).checkpoint(20) == newest
    assert [r.getMessage() for r in caplog.records] == [
        f"{newest.parent}: step_N is now called update_N"
    ]
    link(run / "checkpoints/update_20/weights", [*TINY.iterdir()])
    assert RunFolder(run).checkpoint(20).name == "update_20"


def test_what_has_no_weights_says_so(run: Path) -> None:
    for checkpoint in (run / "checkpoints").glob("update_*"):
        checkpoint.rename(run / checkpoint.name.replace("update", "moved."))
    with pytest.raises(InputError, match="a run that has no checkpoint yet; wait for its first"):
        find_weights(str(run))
    with pytest.raises(InputError, match="a file; name the folder of the checkpoint"):
        find_weights(str(TINY / "model.safetensors"))
    with pytest.raises(InputError, match=r"run: model: model '.*': a run that has no checkpoint"):
        parse(Config, {"model": str(run)}, "run")


@pytest.mark.parametrize(
    ("section", "key", "others"),
    [
        (Config, "model", {}),
        (Config, "tokenizer", {}),
        (SFTConfig, "model", {"output": "out"}),
        (SFTConfig, "tokenizer", {"output": "out"}),
        (CheckpointModel, "path", {}),
        (CheckpointModel, "tokenizer", {"path": "tiny"}),
        (
            MediumRecipe,
            "model",
            {"name": "a", "out": "out", "rl": {}, "compare": {"suites": ["a"]}},
        ),
    ],
)
def test_every_key_of_a_model_takes_a_run(
    run: Path, section: type[Section], key: str, others: dict
) -> None:
    found = parse(section, {key: str(run), **others}, "file")
    assert getattr(found, key) == str(run / "checkpoints/update_20/weights")
    assert SmallRecipe.model_fields["model"].metadata == MediumRecipe.model_fields["model"].metadata


def test_every_loader_takes_a_run(run: Path) -> None:
    weights = run / "checkpoints/update_20/weights"
    assert load_shape(str(run)).parameters == load_shape("tiny").parameters
    assert load_config(str(run)).vocab_size == load_config("tiny").vocab_size
    assert load_tokenizer(str(run)).get_vocab() == load_tokenizer("tiny").get_vocab()
    assert load_model(str(run)).num_parameters() == load_model("tiny").num_parameters()
    assert local_folder(str(run)) == weights
    assert weights_hash(str(run)) == weights_hash("tiny")
    assert WeightFiles(weights).names


def test_a_run_is_measured_under_its_own_config(run: Path) -> None:
    for name in (run, run / "checkpoints/update_9"):
        assert run_of(name) == run.absolute()
        settings = settings_for(name, None, None, [], {})
        assert settings.config.data.system_prompt == "Be brief."
        assert settings.config.model == find_weights(str(name))


def test_a_run_that_starts_from_a_run_records_which_weights(run: Path, tmp_path: Path) -> None:
    config = prepare(small_config(tmp_path / "next", model=str(run))).config
    assert config.model == str(run / "checkpoints/update_20/weights")


# Tokenizers


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """The tiny base without its tokenizer."""
    files = [f for f in TINY.iterdir() if "token" not in f.name and "template" not in f.name]
    return link(tmp_path / "bare", files)


def test_a_model_without_a_tokenizer_asks_for_one_and_takes_it(bare: Path) -> None:
    with pytest.raises(InputError, match=r"holds no tokenizer .* `tokenizer` .* tokenizer=FOLDER"):
        generate(str(bare), "1 + 1?")
    given = ["tokenizer=tiny"]
    found = generate(str(bare), "1 + 1?", None, given, max_tokens=6, temperature=0)
    assert found == generate("tiny", "1 + 1?", max_tokens=6, temperature=0)


def test_a_run_loads_the_tokenizer_that_was_given(bare: Path, tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", model=str(bare), tokenizer="tiny")
    prepared = prepare(config)
    assert prepared.encoder.tokenizer.get_vocab() == load_tokenizer("tiny").get_vocab()
    assert prepared.config.model == str(bare)


def test_a_model_with_another_tokenizer_is_a_folder_of_both(bare: Path, tmp_path: Path) -> None:
    joined = with_tokenizer(str(bare), "tiny")
    assert joined == with_tokenizer(str(bare), str(TINY)) != str(bare)
    assert weights_hash(joined) == weights_hash("tiny")
    assert with_tokenizer("tiny", None) == "tiny"
    own = load_tokenizer("tiny")
    own.chat_template = "{{ messages[0].content }}"
    own.save_pretrained(tmp_path / "own")
    other = with_tokenizer("tiny", str(tmp_path / "own"))
    assert load_tokenizer(other).chat_template == own.chat_template
    assert load_model(other).num_parameters() == load_model("tiny").num_parameters()
    assert weights_hash(other) != weights_hash("tiny")
    with pytest.raises(InputError, match=r"tokenizer '.*bare': .* holds no tokenizer"):
        with_tokenizer("tiny", str(bare))
    with pytest.raises(InputError, match=r"tokenizer '/none/here': no such folder"):
        with_tokenizer("tiny", "/none/here")


def test_a_configs_tokenizer_is_not_that_of_another_model(bare: Path, tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", model=str(bare), tokenizer="tiny")
    assert settings_for(bare, None, config, [], {}).config.tokenizer == "tiny"
    assert settings_for("tiny", None, config, [], {}).config.tokenizer is None


@pytest.mark.parametrize("fetch", [load_config, load_tokenizer, folder_of])
def test_a_hub_that_cannot_be_reached_is_named_at_once(
    fetch: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's client would retry for a minute."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    unreachable = (
        r"'someone/model': no such folder, and the model hub cannot be reached \(127.0.0.1"
    )
    with pytest.raises(InputError, match=unreachable):
        fetch("someone/model")
