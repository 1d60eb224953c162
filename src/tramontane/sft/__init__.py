"""Supervised fine-tuning on prompts and responses."""
