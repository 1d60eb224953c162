"""The configuration of a run, validated; one file per section."""

from tramontane.config.checkpoint import CheckpointConfig
from tramontane.config.config import Config, load_config
from tramontane.config.data import (
    LANGUAGES,
    CurriculumConfig,
    DataConfig,
    Language,
    NamedSetConfig,
    PlaygroundConfig,
    TooHard,
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
from tramontane.config.lora import LoraConfig
from tramontane.config.objectives import (
    BUILT_IN_OBJECTIVES,
    AdvantageOptions,
    ObjectiveConfig,
    ObjectiveOptions,
)
from tramontane.config.pipeline import PipelineConfig
from tramontane.config.placement import PlacementConfig, Resources
from tramontane.config.prompt import PromptConfig, TagPair
from tramontane.config.resume import Change, differences
from tramontane.config.section import (
    Section,
    check_complete,
    key_error,
    load_section,
    nearest,
    parse,
    parse_settings,
    read_settings,
    read_yaml,
    sealed,
)
from tramontane.config.sft import MixtureConfig, SFTConfig, SupervisedConfig
from tramontane.config.stages import StageConfig, StageData, Until
from tramontane.config.timeouts import TimeoutsConfig
from tramontane.config.trainer import TrainerConfig
from tramontane.config.trajectories import TrajectoriesConfig
from tramontane.config.verifier import CustomReward, MathConfig, RewardConfig, VerifierConfig

__all__ = [
    "BUILT_IN",
    "BUILT_IN_OBJECTIVES",
    "GPU_MEMORY_SHARE",
    "HELD_OUT",
    "LANGUAGES",
    "AdvantageOptions",
    "Change",
    "CheckpointConfig",
    "Config",
    "CurriculumConfig",
    "CustomReward",
    "DataConfig",
    "Device",
    "DomainConfig",
    "Dtype",
    "EvaluationConfig",
    "EvaluationSetConfig",
    "FormatConfig",
    "GeneratorConfig",
    "InterruptionConfig",
    "Language",
    "LoraConfig",
    "MathConfig",
    "MixtureConfig",
    "Model",
    "NamedSetConfig",
    "ObjectiveConfig",
    "ObjectiveOptions",
    "PipelineConfig",
    "PlacementConfig",
    "PlaygroundConfig",
    "PromptConfig",
    "Resources",
    "RewardConfig",
    "SFTConfig",
    "Section",
    "StageConfig",
    "StageData",
    "Stop",
    "SupervisedConfig",
    "TagPair",
    "TimeoutsConfig",
    "TooHard",
    "TrainerConfig",
    "TrajectoriesConfig",
    "Until",
    "VerifierConfig",
    "check_complete",
    "differences",
    "key_error",
    "load_config",
    "load_section",
    "nearest",
    "parse",
    "parse_settings",
    "read_settings",
    "read_yaml",
    "sealed",
]
