"""`trainer.lora`: train low-rank adapters instead of the whole model's weights."""

from __future__ import annotations

from pydantic import Field

from tramontane.config.section import Section


class LoraConfig(Section):
    """LoRA (arXiv 2106.09685): the model's weights W are frozen, each target layer computes (W + s
    · B A) x, and only A and B are trained. Needs peft: `pip install 'tramontane[lora]'`. The paper
    trains all weights."""

    rank: int = Field(16, ge=1)
    """Rows of A and columns of B (`r` in peft)."""
    alpha: float = Field(32.0, gt=0)
    """The scale s is alpha / rank (`lora_alpha` in peft)."""
    rslora: bool = False
    """Use the scale s = alpha / √rank, for ranks above 64 (arXiv 2312.03732; `use_rslora` in
    peft)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of the adapters' inputs, only where gradients are computed. With reinforcement
    learning it makes the trained policy differ from the generator's."""
    target_modules: tuple[str, ...] | None = None
    """Linear layers that get an adapter: full names or their last parts, e.g. `q_proj`. null: all
    except the output head."""

    @property
    def scale(self) -> float:
        """Factor s of B A."""
        return float(self.alpha / (self.rank**0.5 if self.rslora else self.rank))
