import json
import re

import pytest

from tramontane.config import Config, check_complete, load_config, load_section, parse, sealed
from tramontane.config.section import _warn_renamed
from tramontane.config.sft import SFTConfig
from tramontane.config.yaml_text import read_yaml
from tramontane.errors import InputError


@pytest.fixture
def load(tmp_path):
    def load(text="", *overrides, cls=Config):
        file, text = tmp_path / "run.yaml", text or "name: run"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_section(cls, file, list(overrides))

    return load


def test_a_key_alone_leaves_all_others_at_their_defaults(load):
    assert load("name: run") == Config()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("verifier.reward.correctness=yes", r"correctness: a number, not true"),
        ("pipeline.updates=true", r"pipeline\.updates: a number, not true"),
        ("data.max_prompt_tokens=off", r"data\.max_prompt_tokens: a number, not false"),
        (
            "verifier.reward.custom=[{function: a.Style}]",
            r"custom\.0\.name: 'Style' cannot be the name of the reward .*: lower-case letters",
        ),
        ("trainer.n_batch=64", r"unknown key; it belongs to another section: pipeline\.n_batch"),
        ("device=cpu", r"another section: .*trainer\.device"),
        ("data=[a.jsonl]", r"data: a section with keys, not .*; write data: \{train: …\}"),
        ("trainer.compile=maybe", r"trainer\.compile: Input should be 'auto', not 'maybe'\n"),
    ],
)
def test_values_of_another_kind_and_keys_of_another_section(load, override, message):
    with pytest.raises(InputError, match=message):
        load("", override)
    assert load("", "trainer.compile=true").trainer.compile is True


@pytest.mark.parametrize(
    "name", ["", " ", ".", "..", "../x", "/x", "a/b", "a\\b", "a\nb", "x" * 300]
)
def test_a_name_that_leads_elsewhere_is_refused_by_its_key(load, name):
    with pytest.raises(InputError, match=r"run\.yaml: name: .*cannot be a file's name"):
        load(f"name: {json.dumps(name)}")
    with pytest.raises(InputError, match=r"(?s)evaluation\.also\..*: .*cannot be a file's name"):
        load(f"evaluation: {{also: {{{json.dumps(name)}: {{source: aime24}}}}}}")


@pytest.mark.parametrize("text", ["\n", "# data: {train: a}\n", "{}", "---\n"])
def test_an_empty_file_is_refused(load, text):
    with pytest.raises(InputError, match=r"run\.yaml: the file is empty"):
        load(text, "pipeline.updates=3")


def test_the_playground_is_the_default_only_without_any_data(load):
    assert (load().data.train, load().data.eval) == ("playground:", "playground:")
    config = load("data: {train: mine.jsonl}")
    assert (config.data.train, config.data.eval) == ("mine.jsonl", None)
    assert load("data: mine.jsonl").data.eval is None
    assert load("", "data.train=mine.jsonl").data.eval is None
    assert "eval" not in config.data.model_fields_set
    config = load("data: {playground: {levels: [1, 2]}}")  # says what to generate
    assert (config.data.train, config.data.eval) == ("playground:", None)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("data: {eval: held_out.jsonl}", "data.train"),
        ("data: {system_prompt: magistral}", "data.train"),
        ("data: {limit: 10}", "data.train"),
        ("data: {environment: guessing}", "data.train"),
        ("stages: [{name: a, data: {train: mine.jsonl}}]", "data.train"),
        ("data: {train: mine.jsonl}\ncold_start: {steps: 3}", "cold_start.data"),
        ("cold_start: {data: {fields: {prompt: q}}}", "cold_start.data.train"),
    ],
)
def test_data_of_ones_own_needs_a_source(load, text, key):
    with pytest.raises(InputError, match=rf"run\.yaml: {key}: not given"):
        load(text)


def test_a_supervised_run_needs_a_source_too(load):
    with pytest.raises(InputError, match=r"run\.yaml: data\.train: not given"):
        load("output: out\nmodel: tiny\ndata: {fields: {prompt: q}}", cls=SFTConfig)


def test_recorded_completions_alone_need_no_source(load):
    assert load("data: {trajectories: {sources: [a.jsonl]}}").data.eval is None
    with pytest.raises(InputError, match=r"data\.train: not given"):
        load("data: {trajectories: {sources: [a.jsonl], share: 0.5}}")


@pytest.mark.parametrize(
    ("text", "key", "lines"),
    [
        ("data: {train: a}\nmodel: x\ndata: {eval: b}\n", "data", "line 1 and in line 3"),
        (
            "pipeline:\n  updates: 1\n  n_batch: 64\n  updates: 2\n",
            "updates",
            "line 2 and in line 4",
        ),
        ("stages:\n  - {name: a,\n     name: b}\n", "name", "line 2 and in line 3"),
        ("data:\n  'train': a\n  train: b\n", "train", "line 2 and in line 3"),
        ("data: {train: a, train: b}\n", "train", "line 1: remove one"),
        ("data:\n  <<: {train: a}\n  <<: {train: b}\n", "<<", "line 2 and in line 3"),
    ],
)
def test_a_key_given_twice_is_refused_with_both_lines(load, text, key, lines):
    with pytest.raises(InputError, match=rf"run.yaml: .*key '{key}' is given twice, in {lines}"):
        load(text)


def test_a_key_given_twice_in_an_override_is_refused(load):
    with pytest.raises(InputError, match="override 'data=.*key 'train' is given twice"):
        load("", "data={train: a, train: b}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("seed=1", "name=a", "seed=1"), "'seed=1': 'seed=1' gives seed already"),
        (("seed=1", "seed=2"), "'seed=2': 'seed=1' gives seed already"),
        (("pipeline.updates=1", "pipeline={n_batch: 64}"), "gives pipeline.updates already"),
    ],
)
def test_a_key_of_two_overrides_is_refused(load, overrides, message):
    with pytest.raises(InputError, match=f"override .*{re.escape(message)}"):
        load("", *overrides)


def test_overrides_may_set_keys_of_one_section(load):
    config = load("", "pipeline={n_batch: 32, group_size: 8}", "pipeline.n_async=64")
    assert (config.pipeline.n_batch, config.pipeline.n_async) == (32, 64)
    assert load("", "data.train=a", "data.train_effort=null").data.train == "a"


def test_a_merged_key_may_be_given_again():
    text = "a: {<<: &x {p: 1, q: 1}, p: 2}\nb: &y {<<: *x, q: 3}\nc: {<<: *y, q: 4}"
    read = read_yaml(text, "text")
    assert read == {"a": {"p": 2, "q": 1}, "b": {"p": 1, "q": 3}, "c": {"p": 1, "q": 4}}


def test_each_read_of_a_text_has_a_value_of_its_own():
    text = "a: [1]"
    read_yaml(text, "text")["a"].append(2)
    assert read_yaml(text, "text") == {"a": [1]}


def test_overrides_replace_values_of_the_file(load):
    config = load(
        "name: mine\npipeline: {n_batch: 64, group_size: 8}\n",
        "pipeline.n_batch=128",
        "trainer.learning_rate=1e-5",
        "data.train=playground:",
        "data.playground.languages=[fr, zh]",
        "data.eval=null",
        "run_dir=out/a=b",
    )
    assert (config.name, config.pipeline.n_batch, config.pipeline.group_size) == ("mine", 128, 8)
    assert config.trainer.learning_rate == 1e-5
    assert config.data.playground.languages == ("fr", "zh")
    assert config.data.eval is None
    assert config.run_dir == "out/a=b"


def test_a_config_survives_its_own_dump(load):
    config = load(
        "pipeline: {n_batch: 64, n_minibatch: 32}\ndata: {train: a, fields: {problem: q}}\n"
    )
    assert parse(Config, config.model_dump(), "dump") == config
    assert parse(Config, config.model_dump(mode="json"), "dump") == config


def test_the_minibatch_is_the_batch_by_default(load):
    assert load().pipeline.minibatch == load().pipeline.n_batch
    assert load("pipeline: {n_batch: 64, n_minibatch: 32}").pipeline.minibatch == 32


def test_resolved_arithmetic_follows_from_the_sizes(load):
    config = load("pipeline: {n_batch: 256, n_minibatch: 128, n_async: 512, group_size: 16}")
    resolved = config.resolved_arithmetic()
    assert resolved["prompts a batch"].startswith("16 × 16")
    assert resolved["optimizer steps an update"] == "2"
    assert "2.0" in resolved["policies a sequence spans"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "generator: {workers: 5}\npipeline: {n_async: 64, n_batch: 64}",
            r"run\.yaml: generator\.workers: 5 workers share 4 groups .* raise n_async",
        ),
        ("pipelin: {}", r"run\.yaml: pipelin: unknown key; did you mean 'pipeline'\?"),
        (
            "pipeline: {n_bacth: 3}",
            r"pipeline\.n_bacth: unknown key; did you mean 'n_batch'\? Completions between two",
        ),
        ("trainer: {objective: {magistral: {epslow: 0}}}", r"magistral\.epslow: .* 'eps_low'\?"),
        ("checkpoint: {zzz: 1}", r"checkpoint\.zzz: unknown key; valid keys: every, grace, keep"),
        ("pipeline: {n_batch: many}", r"pipeline\.n_batch: .*integer"),
        ("pipeline: {group_size: 1}", r"pipeline\.group_size: .* would drop every group"),
        ("data: {playground: {languages: [en, xx]}}", r"data\.playground\.languages\.1: .*'ru'"),
        (
            "data: {playground: {levels: [4, 9]}}",
            r"data\.playground\.levels: levels 4–9 must lie within 1–8",
        ),
        ("data: 3", r"data: "),
        ("- a\n- b", r"run\.yaml: the file must hold keys and values, not a list"),
        ("a: [1", r"run\.yaml: not valid YAML"),
        (b"name: \xff\xfe", r"run\.yaml: "),
    ],
)
def test_an_invalid_file_is_refused_with_key_and_remedy(load, text, message):
    with pytest.raises(InputError, match=message):
        load(text)


def test_text_keys_keep_values_that_yaml_reads_as_other_types(load):
    config = load(
        "",
        "data.train=playground:",
        "name=123",
        "data.fields.problem=7",
        "trainer.objective.magistral.importance_correction=off",
        "data.system_prompt='quoted: text'",
        "data.eval=null",
    )
    assert (config.data.train, config.name, config.data.eval) == ("playground:", "123", None)
    assert config.data.fields == {"problem": "7"}
    assert config.trainer.objective.magistral.importance_correction == "off"
    assert config.data.system_prompt == "quoted: text"


@pytest.mark.parametrize("text", ["Think first. " * 40, "~nobody thinks first."])
def test_a_system_prompt_of_one_line_is_a_text(load, text):
    assert (
        load("", "data.train=a", f"data.system_prompt={text.strip()}").data.system_prompt
        == text.strip()
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "pipeline: {n_batch: 64, n_minibatch: 8}",
            r"pipeline\.n_minibatch: group_size 16 .* n_minibatch 8: ",
        ),
        (
            "trainer: {ranks: 300}",
            r"trainer\.ranks: 300 ranks share a minibatch of 256 ",
        ),
        (
            "trainer: {objective: {name: magistrl}}",
            r"trainer\.objective\.name: no objective 'magistrl', .* 'magistral'\?",
        ),
        (
            "trainer: {objective: {name: xyz}}",
            r"trainer\.objective\.name: no objective 'xyz', .* of that name; choose from magistral",
        ),
        (
            "trainer: {objective: {name: aipo}}\nstages: [{name: a, eps_high: 0.3}]",
            r"stages\.0\.eps_high: objective 'aipo' does not read it; leave it out",
        ),
        (
            "trainer: {threads: 2, ranks: 2}",
            r"trainer\.threads: 2 threads need ranks 1",
        ),
        (
            "placement: {kind: ray}\ntrainer: {device: 'cuda:1'}",
            r"trainer\.device: cuda:1: Ray chooses the GPU",
        ),
        ("generator: {device: gpu}", r"generator\.device: 'gpu' is not a device; write auto, cpu"),
        ("trainer: {device: 'cuda:x'}", r"trainer\.device: 'cuda:x' is not a device"),
    ],
)
def test_a_config_that_no_run_could_start_with_is_refused(load, text, message):
    with pytest.raises(InputError, match=r"run\.yaml: " + message):
        load(text)


def test_valid_devices_are_accepted(load):
    for device in ("cpu", "mps", "cuda", "cuda:1"):
        assert load("", f"trainer.device={device}").trainer.device == device
    assert load("trainer: {threads: 2}", "trainer.device=cuda").trainer.threads == 1


@pytest.mark.parametrize(
    ("device", "expected"), [("cpu", "float32"), ("mps", "float32"), ("cuda:1", "bfloat16")]
)
def test_the_default_number_type_is_that_of_the_device(load, device, expected):
    """The resolved config names it; a type that is given stays."""
    for section in ("generator", "trainer"):
        assert getattr(load("", f"{section}.device={device}"), section).dtype == expected
        found = load("", f"{section}.device={device}", f"{section}.dtype=float32")
        assert getattr(found, section).dtype == "float32"
    dumped = load("", f"generator.device={device}").model_dump()
    assert dumped["generator"]["dtype"] == expected


@pytest.mark.parametrize(
    ("sizes", "key", "message"),
    [
        ("n_batch: 100, group_size: 16", "n_batch", r"group_size 16 does not divide .* n_batch 96"),
        ("n_batch: 64, n_minibatch: 48", "n_minibatch", r"n_minibatch 48 does not divide"),
        ("n_async: 8, group_size: 16", "n_async", r"n_async 8 is below group_size 16.*raise"),
        ("l_max: 64, l_cache: 65", "l_cache", r"l_cache 65 is above l_max 64"),
    ],
)
def test_contradictory_sizes_are_reported_at_their_key(load, sizes, key, message):
    with pytest.raises(InputError, match=rf"run\.yaml: pipeline\.{key}: {message}"):
        load(f"pipeline: {{{sizes}}}")


def test_all_errors_are_reported_at_once(load):
    with pytest.raises(InputError) as caught:
        load("nam: x\nseed: soon\ntrainer: {ranks: 0}\n")
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("pipeline.updates", r"write it as key=value"),
        ("=3", r"write it as key=value"),
        ("name.first=x", r"name is a value, not a section"),
        ("pipeline.updtes=3", r"pipeline\.updtes: unknown key; did you mean 'updates'"),
        ("name=[", r"'name=\['"),
    ],
)
def test_an_invalid_override_is_refused(load, override, message):
    with pytest.raises(InputError, match=message):
        load("name: x", override)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 600, "nested too deeply"),
        ("name: 2024-13-45", "month must be in 1..12"),
        ("name: !!timestamp x", "not valid YAML"),
        ("name: !!int x", "not valid YAML"),
        ("name: !!bool x", "not valid YAML"),
        ("name: !!python/object/apply:os.getpid []", "not valid YAML"),
        ("name: &a [*a]", "more than 1,000,000 values"),
        ("a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [{f'*a{n - 1},' * 9}]\n" for n in range(1, 9)),
         "more than 1,000,000 values"),
        ("name: 2024-01-01", "name: Input should be a valid string"),
        (b"\xff\xfe\x00", "not valid YAML"),
    ],
)  # fmt: skip
def test_whatever_yaml_can_spell_is_read_or_refused(load, text, message):
    with pytest.raises(InputError, match=re.escape(message)):
        load(text)


def test_a_config_that_a_run_wrote_is_complete_or_refused(tmp_path):
    file, config = tmp_path / "config.yaml", Config(name="own", trainer={"learning_rate": 3e-4})
    text = sealed(config).encode()
    file.write_bytes(text)
    check_complete(Config, file)
    assert load_config(file) == config
    edited = text.replace(b"learning_rate: 0.0003", b"learning_rate: 0.0001")
    assert edited != text
    for broken in [edited, *(text[:end] for end in range(0, len(text), 101)), text[:-1]]:
        file.write_bytes(broken)
        with pytest.raises(InputError, match="cut short"):
            check_complete(Config, file)
    # Without its first line it is a config like any other, and a run's if all keys are there.
    body = text.partition(b"\n")[2]
    file.write_bytes(body)
    check_complete(Config, file)
    file.write_bytes(body.replace(b"  learning_rate: 0.0003\n", b""))
    assert load_config(file).name == "own"
    with pytest.raises(InputError, match="trainer.learning_rate is missing"):
        check_complete(Config, file)


def test_what_is_not_a_config_file_is_refused_with_what_is_there(tmp_path):
    with pytest.raises(InputError, match=r"none\.yaml: no such config file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "own.yaml").write_text("name: own\n")
    with pytest.raises(InputError, match=r"own\.yml: no such .* did you mean '.*own\.yaml'"):
        load_config(tmp_path / "own.yml")
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(InputError, match=r"no such config file, but a folder; name a file in it"):
        load_config(run)
    (run / "config.yaml").write_text("name: own\n")
    with pytest.raises(InputError, match=r"but a folder that has one: .*run/config\.yaml"):
        load_config(run)
    with pytest.raises(InputError, match="model=tiny: no such .* give one first, and then keys"):
        load_config("model=tiny")
    rows = tmp_path / "train.jsonl.gz"
    rows.write_bytes(b"")
    with pytest.raises(InputError, match="rows of data, not a config"):
        load_config(rows)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pipeline: {updates: -1}", "updates: Input should be greater than or equal to 1, not -1"),
        ("pipeline: {updates: two}", "updates: Input should be a valid integer, not 'two'"),
        ("trainer: {dtype: fp8}", "trainer.dtype: Input should be 'auto', 'float32' or 'bfloat16', "
         "not 'fp8'"),
        ("data: {tools: my.tool}", "a list, not 'my.tool'; write data.tools: [my.tool]"),
        ("name: [a", "run.yaml: not valid YAML: line 1, column 9: expected ',' or ']', but got"),
        ("data:\n\ttrain: a.jsonl", "line 2, column 1: a tab: indent with spaces"),
        ("data: {train: @a}", "put quotes around a value that begins with @"),
        ("name: a: b", "line 1, column 8: a colon within a value, or a line that is indented"),
        ("name: {a: 1\nb: 2", "(while parsing a flow mapping that begins in line 1)"),
    ],
)  # fmt: skip
def test_an_invalid_value_is_named(load, text, message):
    with pytest.raises(InputError, match=re.escape(message)):
        load(text)


def test_a_config_of_another_command_is_named(load):
    supervised = "output: out\nsteps: 2\nbatch_tokens: 64\ndata: {train: rows.jsonl}\n"
    with pytest.raises(InputError, match=r"run.yaml: a config of `tramontane sft`, by its keys$"):
        load(supervised)
    with pytest.raises(InputError, match="a config of `tramontane train`"):
        load("pipeline: {updates: 2}\ntrainer: {learning_rate: 1e-4}\n", cls=SFTConfig)
    with pytest.raises(InputError, match="steps: unknown key"):  # a slip in a config of this one
        load("pipeline: {updates: 2}\nsteps: 2\noutput: out\n")


def test_a_reward_is_named_by_its_path_alone(load):
    for path in ("rewards.brief", "rewards:brief"):  # as environments and tools are named
        (reward,) = load(f"verifier: {{reward: {{custom: ['{path}']}}}}").verifier.reward.custom
        assert (reward.name, reward.function, reward.weight) == ("brief", "rewards.brief", 1)
    domains = load("verifier: {domains: {sums: {verifier: 'task:check'}}}").verifier.domains
    assert domains["sums"].verifier == "task.check"


@pytest.mark.parametrize("path", ["my_rewards.py:brief", "./my_rewards.py:brief"])
def test_a_file_in_place_of_a_module_is_answered_with_the_module(load, path):
    with pytest.raises(InputError, match=r"names a file; name the function as my_rewards\.brief"):
        load("name: x", f"verifier.reward.custom=[{{function: '{path}', name: brief}}]")
    with pytest.raises(InputError, match=r"names a file; name the function as my_rewards\.brief"):
        load("name: x", f"data.environment={path}")


def test_a_supervised_config_is_parsed_with_the_same_errors(load):
    text = "output: out\ndata: {playground: [{share: 0.7}, {levels: [5, 8], share: 0.3}]}\n"
    config = load(text, "steps=5", cls=SFTConfig)
    assert [part.share for part in config.data.playground] == [0.7, 0.3]
    assert config.steps == 5
    with pytest.raises(InputError, match=r"output: not given; set it in the file"):
        load("steps: 3", cls=SFTConfig)
    with pytest.raises(InputError, match=r"new_model\.vocab: .*'vocab_size'"):
        load("output: x\nnew_model: {vocab: 600}", cls=SFTConfig)
    with pytest.raises(InputError, match=r"data\.playground\.1\.shar: .* did you mean 'share'"):
        load("output: x\ndata: {playground: [{}, {shar: 1}]}", cls=SFTConfig)
    with pytest.raises(InputError, match=r"threads: 2 threads need ranks 1"):
        load("output: x\nthreads: 2\nranks: 2", cls=SFTConfig)
    with pytest.raises(InputError, match=r"activation_offload .* gradient_checkpointing to true"):
        load("output: x\nactivation_offload: true", cls=SFTConfig)


def test_a_key_is_read_under_its_old_name(tmp_path, caplog):
    _warn_renamed.cache_clear()
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {warmup_steps: 3}")
    assert load_config(file).trainer.warmup_updates == 3
    assert "key warmup_steps is now called warmup_updates" in caplog.text
    with pytest.raises(InputError, match=r"trainer\.warmup_steps: the old name of warmup_updates"):
        load_config(file, ["trainer.warmup_updates=1"])
    file.write_text(sealed(Config()).partition("\n")[2].replace("warmup_updates", "warmup_steps"))
    check_complete(Config, file)


def test_a_removed_key_may_have_its_default_and_no_other_value(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {objective: {spo: {q_max: -0.01, r_min: 1.0e-3}}}")
    assert load_config(file) == Config()
    message = r"trainer\.objective\.spo\.q_max: removed: the bound is SUCCESS_MAX in trainer/obj"
    with pytest.raises(InputError, match=message):
        load_config(file, ["trainer.objective.spo.q_max=-0.1"])
