"""Frozen configuration, passed by constructor; there is no global getter."""

from lmkit.config.engine import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedConfig, SpecConfig

__all__ = ["CacheConfig", "EngineConfig", "ModelConfig", "ParallelConfig", "SchedConfig", "SpecConfig"]
