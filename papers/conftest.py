"""Tests of the papers run under the settings of the package's tests, and share their fixtures."""

from tests.conftest import one_layer, vllm_environment

__all__ = ["one_layer", "vllm_environment"]
