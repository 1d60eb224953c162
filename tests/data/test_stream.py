import json
from importlib.util import find_spec

import pytest

from tramontane.config import DataConfig
from tramontane.data.playground import split_of
from tramontane.data.stream import BLOCK, KEPT, ProblemStream
from tramontane.errors import InputError


@pytest.fixture
def file(tmp_path):
    rows = ({"problem": f"p{i}", "answer": str(i)} for i in range(10))
    path = tmp_path / "ten.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def take(stream, n):
    return [stream.next().problem for _ in range(n)]


def resumed(config, seed, state):
    stream = ProblemStream(config, seed)
    stream.load_state(json.loads(json.dumps(state)))
    return stream


def test_every_epoch_has_every_problem_once_in_a_new_order(file):
    config = DataConfig(train=str(file))
    stream = ProblemStream(config, 0)
    epochs = [take(stream, 10) for _ in range(4)]
    assert [sorted(e) for e in epochs] == [[f"p{i}" for i in range(10)]] * 4
    assert len({tuple(e) for e in epochs}) == 4
    order = [problem for epoch in epochs for problem in epoch]
    assert take(ProblemStream(config, 0), 40) == order
    assert take(ProblemStream(config, 1), 40) != order


def test_without_shuffling_the_order_is_the_files(file):
    stream = ProblemStream(DataConfig(train=str(file), shuffle=False), 0)
    assert take(stream, 13) == [f"p{i % 10}" for i in range(13)]


def test_epoch_and_position(file):
    stream = ProblemStream(DataConfig(train=str(file)), 0)
    assert (stream.epoch, stream.position) == (0, 0)
    take(stream, 23)
    assert (stream.epoch, stream.position) == (2, 3)
    endless = ProblemStream(DataConfig(train="playground:"), 0)
    take(endless, 230)
    assert (endless.epoch, endless.position) == (0, 230)
    assert endless.problems is None
    assert len(stream.problems) == 10


@pytest.mark.parametrize("after", [0, 1, 9, 10, 11, 63, 64, 65, 200])
@pytest.mark.parametrize("source", ["file", "playground:"])
def test_a_restored_stream_continues_exactly(file, source, after):
    config = DataConfig(train=str(file) if source == "file" else source)
    stream = ProblemStream(config, 5)
    take(stream, after)
    copy = resumed(config, 5, stream.state())
    assert copy.position == stream.position
    assert copy.epoch == stream.epoch
    assert take(copy, 70) == take(stream, 70)


def test_restoring_does_not_replay():
    """A replay of this many problems would not end."""
    state = ProblemStream(DataConfig(train="playground:"), 3).state() | {"handed_out": 10**15}
    copies = [resumed(DataConfig(train="playground:"), 3, state) for _ in range(2)]
    first, second = (take(copy, 70) for copy in copies)
    assert first == second
    assert copies[0].position == 10**15 + 70


def test_endless_playground_keeps_to_its_split_and_hardly_repeats():
    stream = ProblemStream(DataConfig(train="playground:"), 0)
    drawn = [stream.next() for _ in range(2000)]
    assert {split_of(p.metadata["expression"]) for p in drawn} == {"train"}
    assert len({p.problem for p in drawn}) > 1900


def test_a_sample_that_is_looked_at_again_is_not_drawn_again():
    stream = ProblemStream(DataConfig(train="playground:"), 0)
    beginning = stream.state()
    sample = [stream.next() for _ in range(KEPT * BLOCK)]
    stream.load_state(beginning)
    assert all(stream.next() is problem for problem in sample)
    rest = take(stream, 70)
    stream.load_state(beginning)
    assert take(stream, len(sample)) + take(stream, 70) == [p.problem for p in sample] + rest


def test_a_limit_makes_the_playground_finite():
    stream = ProblemStream(DataConfig(train="playground:", limit=16), 0)
    assert set(take(stream, 16)) == set(take(stream, 16))
    assert stream.epoch == 2


def test_a_state_of_other_data_is_refused(file):
    config = DataConfig(train=str(file))
    state = ProblemStream(config, 0).state()
    moved = file.rename(file.with_name("moved.jsonl"))
    with pytest.raises(InputError, match="is not what the checkpoint was written with"):
        resumed(DataConfig(train=str(moved)), 1, state)
    moved.write_text(moved.read_text().replace("p3", "q3"))
    with pytest.raises(InputError, match="the rows have changed"):
        resumed(DataConfig(train=str(moved)), 0, state)
    levels = DataConfig(train="playground:", playground={"levels": (1, 2)})
    with pytest.raises(InputError, match="setting under data"):
        resumed(levels, 0, ProblemStream(DataConfig(train="playground:"), 0).state())


def test_bad_data_is_refused_before_anything_is_handed_out(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        ProblemStream(DataConfig(train=str(tmp_path / "none.jsonl")), 0)
    if find_spec("reasoning_gym") is None:  # not imported here, but in the process that draws
        pytest.skip("could not import 'reasoning_gym'")
    with pytest.raises(InputError, match="no such dataset"):
        ProblemStream(DataConfig(train="reasoning_gym:chainsum"), 0)


def test_endless_reasoning_gym():
    if find_spec("reasoning_gym") is None:  # not imported here, but in the process that draws
        pytest.skip("could not import 'reasoning_gym'")
    config = DataConfig(train="reasoning_gym:chain_sum")
    stream = ProblemStream(config, 0)
    assert len(set(take(stream, 150))) > 140
    assert take(resumed(config, 0, stream.state()), 70) == take(stream, 70)
