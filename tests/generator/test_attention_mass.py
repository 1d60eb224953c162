"""How much of a softmax lies in one of two parts, by which attention to a shared prefix and to a
sequence's own positions is merged."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tramontane.generator.attention import _log_sum_exp

# Spreads beyond what a float32 can hold as a weight (exp(-104) is 0) among them.
scores = st.lists(st.floats(-300, 300, width=32), min_size=1, max_size=8)


@given(st.lists(scores, min_size=1, max_size=4))
def test_mass_is_the_logarithm_of_the_denominator(rows):
    longest = max(map(len, rows))
    padded = torch.full((len(rows), longest), torch.finfo(torch.float32).min / 2)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = torch.tensor(values)
    weights = torch.softmax(padded, -1)
    torch.testing.assert_close(
        _log_sum_exp(padded, weights), padded.logsumexp(-1), atol=1e-3, rtol=1e-5
    )
