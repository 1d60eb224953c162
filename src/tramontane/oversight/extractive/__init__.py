"""The generated extractive task."""

from tramontane.oversight.extractive.generate import FRAMES, extractive_questions

__all__ = ["FRAMES", "extractive_questions"]
