"""Recorded rollouts that look like reward hacking or verifier error."""
