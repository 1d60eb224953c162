"""Action-conditional self-prediction: BYOL-Π, BYOL-AC and BYOL-VAR (arXiv 2406.02035)."""
