"""Prompts in, completions out: a slot engine whose weights change while sequences are in flight."""

from tramontane.generator.engine import SlotEngine
from tramontane.generator.generator import Generator

__all__ = ["Generator", "SlotEngine"]
