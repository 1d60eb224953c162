"""Measurements on one GPU: `make gpu`, or `python -m benchmarks.gpu`; see docs/gpu.md."""
