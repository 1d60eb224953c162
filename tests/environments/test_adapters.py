"""Environments of other packages, played to their end through a worker."""

import random
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import get_json_schema

from tests.environments.templates import tokenizer_of
from tests.environments.test_worker import call, problem, talk
from tests.environments.worlds import TrlCounter, TrlWordle
from tramontane.config import Config, DataConfig
from tramontane.config.data import SCHEMES
from tramontane.data.prompts import PromptEncoder
from tramontane.environments import loading
from tramontane.environments.tools import methods, schema_of
from tramontane.environments.worker import EnvironmentWorker
from tramontane.errors import InputError

PACKAGES = {"skyrl": "skyrl_gym"}  # of schemes with another name


def package(scheme):
    name = PACKAGES.get(scheme, scheme)
    return pytest.importorskip(name, reason=f"needs tramontane-rl[{scheme}]", exc_type=ImportError)


def worker_of(environment):
    config = Config(model="tiny", data={"train": "playground:", "environment": environment})
    return EnvironmentWorker(config, PromptEncoder(tokenizer_of("qwen2.5")))


def shown(spoken):
    return [message["content"] for turn in spoken.turns for message in turn.messages]


def test_a_class_as_in_trls_guide():
    # TRL lists tools on the class: properties are not evaluated, and private methods are not tools.
    worker = worker_of("tests.environments.worlds:TrlWordle")
    given = problem("Guess.", "crane")
    answered, spoken = talk(
        worker, call("guess", word="slate"), call("guess", word="crane"),
        call("guess", word="extra"), "Done.", given=given,
    )  # fmt: skip
    assert shown(spoken) == ["..G.G", "GGGGG", "error: ValueError: Game over."]
    assert answered.ending == "completed" and answered.turn.reward == 1.0
    prompt = spoken.tokenizer.decode(spoken.prompt)
    assert re.findall(r'"name": "(\w+)"', prompt.partition("For each")[0]) == ["guess"]
    assert "Guess." in prompt


@pytest.mark.slow
@pytest.mark.parametrize("environment", [TrlCounter, TrlWordle])
def test_trls_trainer_finds_the_same_tools(environment, tmp_path, monkeypatch):
    trl = pytest.importorskip("trl", reason="trl is not installed")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    tokenizer = tokenizer_of.__wrapped__("qwen3")
    tokenizer.pad_token = tokenizer.eos_token
    shipped = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    tokenizer.chat_template = shipped.read_text()  # it refuses others than its own
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), num_hidden_layers=1, **sizes)
    trainer = trl.GRPOTrainer(
        model=LlamaForCausalLM(config),
        args=trl.GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=[]),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "?"}]}] * 8),
        environment_factory=environment,
        processing_class=tokenizer,
    )
    assert [get_json_schema(tool) for tool in trainer.tools] == [
        schema_of(tool) for tool in methods(environment)
    ]
    assert trainer.reward_func_names == [environment.__name__]  # of `get_reward`


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_name_that_the_package_does_not_know(scheme):
    package(scheme)
    with pytest.raises(InputError, match=rf"data.environment: {scheme}:Nonesuch-v0: .*"):
        loading.check(DataConfig(train="playground:", environment=f"{scheme}:Nonesuch-v0"))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_package_that_is_not_installed(scheme, monkeypatch):
    name, adapter = PACKAGES.get(scheme, scheme), SCHEMES[scheme].rpartition(".")[0]
    for module in [*sys.modules]:
        if module == adapter or module.startswith(f"{name}."):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=rf"pip install 'tramontane-rl\[{scheme}\]'"):
        loading.check(DataConfig(train="playground:", environment=f"{scheme}:Missing-v0"))


def test_a_scheme_needs_a_name():
    with pytest.raises(ValueError, match="names no environment: write textarena:NAME"):
        DataConfig(train="playground:", environment="textarena:")


def bisect(low=1, high=20, secret=None):
    """The guesses that lead to the number."""
    while True:
        guess = (low + high) // 2
        yield guess
        if guess == secret:
            return
        low, high = (guess + 1, high) if guess < secret else (low, guess - 1)


def test_a_game_of_textarena():
    package("textarena")
    worker = worker_of("textarena:GuessTheNumber-v0")
    given = problem(seed=5)  # of the row
    secret = random.Random(5).randint(1, 20)
    guesses = [f"I try [{guess}]." for guess in bisect(secret=secret)]
    outside = random.getstate(), np.random.get_state()[1].tolist()
    answered, spoken = talk(worker, *guesses, given=given)
    assert answered.ending == "completed" and answered.turn.reward == 1.0
    assert "guess the number between 1 and 20" in spoken.tokenizer.decode(spoken.prompt)
    assert all(
        re.fullmatch(r"The target number is (lower|higher)\.", s) for s in shown(spoken)[:-1]
    )
    assert "Congratulations" in shown(spoken)[-1]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == outside
    # An invalid move is answered; the second in a row ends the game.
    answered, spoken = talk(worker, "[99]", "[99]", "[1]", given=given)
    assert "invalid move" in shown(spoken)[0]
    assert answered.ending == "completed" and answered.turn.reward == 0.0
    assert len(spoken.turns) == 2


@pytest.mark.parametrize(
    "name",
    ["Blackjack", "FifteenPuzzle", "FrozenLake", "LightsOut", "LogicPuzzle", "Mastermind",
     "Minesweeper", "PegJump", "RushHour", "Secretary", "Set", "Slitherlink", "Sokoban", "Sudoku",
     "ThreeCardMonte", "TowerOfHanoi"],
)  # fmt: skip
def test_games_of_textarena_for_one(name):
    package("textarena")
    worker, given = worker_of(f"textarena:{name}-v0"), problem(seed=5)
    starts = {tuple(talk(worker, given=given)[1].prompt) for _ in range(2)}
    assert len(starts) == 1  # one seed is one game
    answered, _ = talk(worker, *["Hm."] * 30, given=given, l_max=20_000)
    assert answered.ending == "completed", answered.reason
    assert -1 <= answered.turn.reward <= 1


def test_a_game_of_textarena_keeps_its_own_random_numbers():
    package("textarena")
    load = loading.load("textarena:Blackjack-v0")

    def play(shown, disturb=lambda: None):
        game = load()
        shown += game.start(problem(), 3)
        done = False
        while not done:
            disturb()
            turn = game.step({"content": "[Hit]"})
            shown += turn.messages if not turn.done else [turn.reward]
            done = turn.done

    alone, disturbed = [], []
    play(alone)
    play(disturbed, lambda: random.seed(len(disturbed)))
    assert alone == disturbed and len(alone) > 3
    many = [[] for _ in range(8)]
    threads = [threading.Thread(target=play, args=(shown,)) for shown in many]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert many == [alone] * 8


def test_a_game_of_textarena_for_two_is_refused():
    package("textarena")
    with pytest.raises(InputError, match=r"textarena:TicTacToe-v0: the game cannot begin with one"):
        loading.check(DataConfig(train="playground:", environment="textarena:TicTacToe-v0"))


def test_an_environment_of_gymnasium():
    package("gymnasium")
    worker = worker_of("gymnasium:tests.environments.text_spaces:Echo-v0")
    answered, spoken = talk(worker, "no!", "ab", "abc", "abcd", given=problem(seed=11, lengths=3))
    assert "Write 3 texts (seed 11)" in spoken.tokenizer.decode(spoken.prompt)
    assert shown(spoken)[0].startswith("error: not an action of Text(")
    assert shown(spoken)[1:] == ["ab", "abc", ""]
    assert [turn.reward for turn in spoken.turns] == [None, 2.0, 3.0, 4.0]
    assert answered.ending == "completed"


def test_an_episode_of_gymnasium_is_cut_short_and_closed():
    package("gymnasium")
    load = loading.load("gymnasium:tests.environments.text_spaces:Echo-v0")
    from tests.environments.text_spaces import Echo
    from tramontane.environments.adapters.gymnasium import Gymnasium

    before = Echo.closed
    game = load()
    [begun] = game.start(problem(lengths=2), 7)
    assert begun == {"role": "user", "content": "Write 2 texts (seed 7)."}
    turn = game.step({"content": "d"})
    assert turn.messages == [{"role": "user", "content": "d"}]
    assert (turn.reward, turn.done) == (1.0, True)
    game.close()
    assert Echo.closed == before + 1
    Gymnasium.check("tests.environments.text_spaces:Echo-v0")
    assert Echo.closed == before + 2


def test_actions_of_gymnasium_that_are_no_texts_are_refused():
    package("gymnasium")
    path = "gymnasium:tests.environments.text_spaces:Silent-v0"
    with pytest.raises(
        InputError, match=r"its actions are Discrete\(2\), not Text; .*TransformAction"
    ):
        loading.check(DataConfig(train="playground:", environment=path))


def test_an_environment_of_gymnasium_with_other_spaces_is_refused():
    package("gymnasium")
    with pytest.raises(InputError, match=r"its observations are Discrete\(16\), not Text; wrap it"):
        loading.check(DataConfig(train="playground:", environment="gymnasium:FrozenLake-v1"))


def test_an_environment_of_skyrl():
    package("skyrl")
    worker = worker_of("skyrl:gsm8k_multi_turn")
    given = problem("What is 3 + 4?", "7", max_turns=3)
    answered, spoken = talk(worker, "Hm.", "#### 8", "#### 7", given=given)
    assert "What is 3 + 4?" in spoken.tokenizer.decode(spoken.prompt)
    assert ["final numeric answer" in text for text in shown(spoken)] == [False, True]
    assert [turn.reward for turn in spoken.turns] == [0.0, pytest.approx(0.2 / 3), 1.0]
    assert answered.ending == "completed"
    # One turn, and a problem without an answer.
    answered, spoken = talk(worker_of("skyrl:gsm8k"), "#### 7", given=given)
    assert answered.ending == "completed" and answered.turn.reward == 1.0


@pytest.fixture(scope="module")
def server():
    """The address of a server of OpenEnv."""
    package("openenv")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tests.environments.open_environments", str(port)]
    with subprocess.Popen(command) as process:
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
        process.kill()


@pytest.mark.slow
def test_an_environment_of_openenv_by_address(server):
    plays(f"openenv:{server}")


def test_an_environment_of_openenv_in_process():
    package("openenv")
    plays("openenv:tests.environments.open_environments:Guessing")


def plays(environment):
    given = problem(seed=4, highest=20, unknown="not an argument of reset")
    secret = random.Random(4).randint(0, 20)
    guesses = [str(guess) for guess in bisect(0, 20, secret)]
    loading.check(DataConfig(train="playground:", environment=environment))
    answered, spoken = talk(worker_of(environment), *guesses, given=given)
    assert "Guess from 0 to 20." in spoken.tokenizer.decode(spoken.prompt)
    assert set(shown(spoken)[:-1]) <= {"higher", "lower"}
    assert answered.ending == "completed" and answered.turn.reward == 1.0
    assert [turn.reward for turn in spoken.turns[:-1]] == [0.0] * (len(guesses) - 1)
    # An environment that fails is not a wrong answer.
    answered, _ = talk(worker_of(environment), "ten", given=given)
    assert answered.ending == "environment_failed" and "invalid literal" in answered.reason


def test_actions_of_several_fields_are_json():
    package("openenv")
    worker = worker_of("openenv:tests.environments.open_environments:Grid")
    answered, spoken = talk(
        worker, "top left", '{"row": "top"}', 'I take\n```json\n{"row": 0, "column": 1}\n```',
        '{"row": 1, "column": 1}',
    )  # fmt: skip
    assert '{"cells": [[0, 0], [0, 0]]}' in spoken.tokenizer.decode(spoken.prompt)
    assert shown(spoken) == [
        "error: not an action: write a JSON object with row, column",
        "error: not an action: 'column' is a required property",
        '{"cells": [[0, 1], [0, 0]]}',
        '{"cells": [[0, 1], [0, 1]]}',
    ]
    assert answered.ending == "completed" and answered.turn.reward is None


def test_a_server_of_openenv_that_does_not_run():
    package("openenv")
    with pytest.raises(InputError, match=r"openenv:http://127.0.0.1:1: the server does not answer"):
        loading.check(DataConfig(train="playground:", environment="openenv:http://127.0.0.1:1"))
