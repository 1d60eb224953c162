r"""Verdicts in other trainers and evaluations: one import each, without torch.

    from tramontane.verdicts import verify

    verify(r"so it is \boxed{1/2}", "0.5").verdict  # "right"

`Grader` grades many texts with the pool's limits, synchronously or not. The modules `trl`, `verl`,
`openrlhf`, `verifiers`, `lm_eval` and `inspect_ai` put it into the call shapes of these packages,
which they only import where a class of theirs must be extended; `server` answers over HTTP.
"""

from tramontane.types import Verdict
from tramontane.verdicts.grader import KINDS, Grader, Kind, Sample, verify, verify_async
from tramontane.verdicts.reasons import Reason, as_json, reason_of
