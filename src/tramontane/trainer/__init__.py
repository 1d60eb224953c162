"""Groups → weights: advantages, objectives, collation, optimizer, checkpoints."""

from tramontane.trainer.trainer import Trainer
