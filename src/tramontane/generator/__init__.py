"""Prompts → completions: a slot engine whose weights can change while sequences are in flight."""

from tramontane.generator.engine import SlotEngine
from tramontane.generator.generator import Generator

__all__ = ["Generator", "SlotEngine"]
