"""Hugging Face causal LMs: loading, packed attention, packed rows, and weights in transfer."""
