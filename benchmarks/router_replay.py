"""KL(μ‖π) between a generator and a trainer in bfloat16, with the trainer's own choice of experts
and with the generator's; docs/experts.md has the results."""

from __future__ import annotations

import numpy as np
import torch

from tests.generator.slot_models import finish, make_requests, make_tokenizer
from tests.models.test_routing import KINDS, make, trainer_of
from tramontane.batches import TrainSequence
from tramontane.config import GeneratorConfig
from tramontane.generator import Generator
from tramontane.models import routing


def sample(kind: str, float32: bool) -> list[TrainSequence]:
    """Completions of a random model, with their experts."""
    model = make(kind, torch.bfloat16)
    routing.prepare(model, float32)
    config = GeneratorConfig(return_routed_experts=True)
    generator = Generator(model, make_tokenizer(), config, slots=32, max_len=140)
    generator.submit(make_requests(24, 8, seed=3, lengths=(2, 30), tokens=(60, 100)))
    return [TrainSequence.of(c) for _, c in sorted(finish(generator).items())]


def main() -> None:
    for kind in KINDS:
        for float32 in (False, True):
            sequences = sample(kind, float32)
            for replayed in (False, True):
                trainer = trainer_of(
                    make(kind), dtype="bfloat16", router_replay=replayed, float32_router=float32
                )
                logprobs = trainer.logprobs(sequences, 1.0)
                pairs = zip(sequences, logprobs, strict=True)
                d = np.concatenate([np.array(found) - s.logprobs for s, found in pairs])
                print(
                    f"{kind:9} {'float32' if float32 else 'bfloat16':8} "
                    f"{'replay' if replayed else 'own choice':10} {len(d):6,} tokens  "
                    f"KL {np.mean(np.expm1(d) - d):.1e}  largest {np.abs(d).max():.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
