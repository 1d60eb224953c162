"""Text halves that are loaded as another causal LM compute what their wrapper does on text."""

import pytest
from transformers import CONFIG_MAPPING

from benchmarks.architectures.rows import every_row
from benchmarks.architectures.sizes import tiny_config
from tramontane.errors import InputError
from tramontane.models.equivalents import check_equivalent
from tramontane.models.families import EQUIVALENTS
from tramontane.models.wrapped import TextHalf, converted


def test_each_is_checked_on_the_checkpoints_own_config(subtests):
    checked = set()
    for kind in sorted({row.kind for row in every_row() if row.wrapped}):
        own = tiny_config(kind)
        if (text := own.get_text_config().model_type) in EQUIVALENTS:
            checked.add(text)
            with subtests.test(kind):
                check_equivalent(kind, own, TextHalf(kind, own, None).config)
    assert checked == {*EQUIVALENTS}


def test_one_that_computes_something_else_is_refused():
    own = tiny_config("paddleocr_vl")  # rotates halves of a head, and ERNIE 4.5 pairs
    with pytest.raises(InputError, match="'a': with this config, paddleocr_vl computes something"):
        check_equivalent("a", own, converted(own.get_text_config(), "ernie4_5"))


@pytest.mark.parametrize("kind", ["glm4v", "glm_ocr"])
def test_heads_are_rotated_as_a_whole_where_the_config_does_not_say(kind):
    own = tiny_config(kind)
    text = own.get_text_config()
    text.rope_parameters.pop("partial_rotary_factor", None)
    half = TextHalf(kind, own, None).config
    assert half.rope_parameters["partial_rotary_factor"] == 1.0
    check_equivalent(kind, own, half)
    assert CONFIG_MAPPING["glm4"]().rope_parameters["partial_rotary_factor"] == 0.5  # its default
