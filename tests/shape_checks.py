"""A plugin of pytest (`-p tests.shape_checks`): checks the shapes and number types that functions
state by jaxtyping, at every call."""

from jaxtyping import install_import_hook

MODULES = [
    "generator.sampling",
    "models.attention",
    "models.families",
    "models.flash",
    "models.latent",
    "trainer.advantages",
    "trainer.masks",
    "trainer.objectives.distill",
    "trainer.objectives.spo",
    "trainer.ratios",
]

install_import_hook([f"tramontane.{module}" for module in MODULES], "beartype.beartype")
