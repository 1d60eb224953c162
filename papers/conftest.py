"""Tests of the papers run under the settings of the package's tests, and share their fixtures."""

from tests.conftest import vllm_environment

__all__ = ["vllm_environment"]
