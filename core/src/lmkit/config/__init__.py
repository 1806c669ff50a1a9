"""Frozen configuration, passed by constructor; there is no global getter."""

from lmkit.config.codec import from_dict, to_dict
from lmkit.config.environment import Environment, read_environment
from lmkit.config.options import from_options
from lmkit.config.sizes import format_size, parse_budget, parse_size
from lmkit.contracts.config import STEP_TOKENS, CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedConfig

__all__ = [
    "STEP_TOKENS",
    "CacheConfig",
    "EngineConfig",
    "Environment",
    "ModelConfig",
    "ParallelConfig",
    "SchedConfig",
    "format_size",
    "from_dict",
    "from_options",
    "parse_budget",
    "parse_size",
    "read_environment",
    "to_dict",
]
