"""The logarithm of a softmax' denominator, which weighs attention to a shared prefix against
attention to a sequence's unshared positions when the two are merged."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tramontane.generator.attention import _log_sum_exp

# Some spreads exceed what a float32 weight can hold: exp(-104) is 0.
scores = st.lists(st.floats(-300, 300, width=32), min_size=1, max_size=8)


@given(st.lists(scores, min_size=1, max_size=4))
def test_the_log_sum_from_one_weight_is_exact(rows):
    longest = max(map(len, rows))
    padded = torch.full((len(rows), longest), torch.finfo(torch.float32).min / 2)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = torch.tensor(values)
    weights = torch.softmax(padded, -1)
    torch.testing.assert_close(
        _log_sum_exp(padded, weights), padded.logsumexp(-1), atol=1e-3, rtol=1e-5
    )
