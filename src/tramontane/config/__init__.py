"""The configuration of a run, validated; one file a section."""

from tramontane.config.config import *  # noqa: F403
from tramontane.config.settings import Section, load_section, parse, parse_settings  # noqa: F401
