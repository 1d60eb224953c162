"""The configuration of a run, validated; one file per section."""

from tramontane.config.config import Config, load_config
from tramontane.config.conversation import ConversationConfig, RewardSource
from tramontane.config.data import (
    LANGUAGES,
    PLAYGROUND,
    DataConfig,
    Language,
    NamedSetConfig,
    PlaygroundConfig,
    TrajectoriesConfig,
)
from tramontane.config.device import Device, Dtype, Model
from tramontane.config.domains import BUILT_IN, DomainConfig, FormatConfig
from tramontane.config.evaluation import HELD_OUT, EvaluationConfig, EvaluationSetConfig
from tramontane.config.generator import (
    GPU_MEMORY_SHARE,
    GeneratorConfig,
    InterruptionConfig,
    Stop,
)
from tramontane.config.objective_choice import BUILT_IN_OBJECTIVES, ObjectiveConfig
from tramontane.config.objectives import AdvantageOptions, ObjectiveOptions
from tramontane.config.pipeline import PipelineConfig
from tramontane.config.prompt import EffortConfig, PromptConfig, TagPair
from tramontane.config.resume import Change, differences
from tramontane.config.running import Resources, TimeoutsConfig
from tramontane.config.section import (
    Section,
    check_complete,
    key_error,
    load_section,
    nearest,
    parse,
    parse_settings,
    read_settings,
    sealed,
)
from tramontane.config.sft import MixtureConfig, SFTConfig, SupervisedConfig
from tramontane.config.stages import Until
from tramontane.config.teacher import TeacherConfig
from tramontane.config.trainer import LoraConfig, TrainerConfig
from tramontane.config.verifier import AXES, CustomReward, MathConfig, RewardConfig, VerifierConfig
