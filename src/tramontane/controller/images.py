"""What a run or an evaluation on images may not have yet, so that no image is left out in silence;
docs/images.md lists it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tramontane.config import Config
from tramontane.data.prompts import PromptEncoder
from tramontane.errors import InputError
from tramontane.models.image_tokens import ImageProcessor
from tramontane.types import Problem


def check_images(
    config: Config,
    encoder: PromptEncoder,
    problems: Sequence[Problem],
    compiled: bool | None = None,
) -> None:
    """Check that all workers of a config take the images of problems, if these have any.

    Args:
        config: the run's, or an evaluation's.
        encoder: makes the model's prompts.
        problems: what is read.
        compiled: whether the trainer's layers are compiled; None where nothing is trained.

    Raises:
        InputError: one does not, or the model is of a family that is not supported; the message
            names the row, and the key to change.
    """
    illustrated = next((problem for problem in problems if problem.images), None)
    if illustrated is None:
        if compiled is not None and config.trainer.vision != "frozen":
            raise InputError(
                f"trainer.vision: {config.trainer.vision} trains on images, and the rows that were "
                f"read have none: give rows with images, or leave it out"
            )
        return
    where = illustrated.where or f"problem {illustrated.id!r}"
    for key, what in unsupported(config, encoder.images, compiled):
        raise InputError(
            f"{where}: has an image, and {what} take none yet ({key}): change that key, or take "
            f"rows without images (docs/images.md)"
        )
    if (judge := config.verifier.judge) and judge.checkpoint:
        try:
            ImageProcessor(judge.checkpoint.path).parent  # noqa: B018
        except InputError as error:
            raise InputError(
                f"{where}: has an image, and the judge would not see it: verifier.judge.checkpoint:"
                f" {error}"
            ) from None
    for model in config.teachers if compiled is not None else ():
        _check_teacher(model, encoder, illustrated.images[0], where)
    encoder.at(next(iter(encoder.levels), None)).encode(illustrated.prompt, where)


def _check_teacher(model: str, encoder: PromptEncoder, image: str, where: str) -> None:
    theirs = ImageProcessor(model)
    try:
        count = theirs.expansion(image).count(theirs.token)
    except InputError as error:
        raise InputError(
            f"{where}: has an image, and the teacher would not see it: teacher: {error}"
        ) from None
    assert encoder.images is not None  # it wrote prompts with images
    own = encoder.images.expansion(image).count(encoder.image_token)
    if (theirs.token, count) != (encoder.image_token, own):
        raise InputError(
            f"{where}: its image takes {count:,} tokens {theirs.token} of teacher {model!r}, and "
            f"{own:,} {encoder.image_token} of the model: a teacher scores the model's own tokens, "
            f"so name one whose processor writes the same"
        )


def unsupported(
    config: Config, images: ImageProcessor | None, compiled: bool | None
) -> Iterator[tuple[str, str]]:
    """Keys of the config, with what they turn on that takes no images; see `check_images`. Without
    the model's processor `images`, of images that an environment or a tool gives."""
    generator, trainer = config.generator, config.trainer
    deep, judge = images is not None and images.family.deep, config.verifier.judge
    what = "reward models" if judge and judge.reward_model else "judges"
    blind = judge and (images is None or judge.reward_model)
    checks: dict[str, tuple[str, object]] = {
        "generator.compile": (
            "compiled layers of its model",
            deep and generator.compile and generator.device.startswith("cuda"),
        ),
        "generator.kind": (
            "vLLM's generators, for a family whose images change more than embeddings,",
            generator.kind == "vllm" and images is not None and not images.family.plain,
        ),
        "generator.interruption": ("interrupted thoughts", generator.interruption),
        "verifier.judge": (what, blind),
    }
    if compiled is not None:
        checks |= {
            "trainer.compile": ("compiled layers of its model", deep and compiled),
            "trainer.context_parallel": ("ranks that share rows", trainer.context_parallel > 1),
            "trainer.objective": ("value networks", "values" in trainer.objective.needs),
            "cold_start": ("cold starts", config.cold_start),
            "data.trajectories": ("recorded completions", config.data.trajectories),
        }
    yield from ((key, what) for key, (what, used) in checks.items() if used)
