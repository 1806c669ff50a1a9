"""Fixtures over the world of pretend plugins."""

from __future__ import annotations

import pytest
from lmkit_testing.host import DistDir, dist_dir, lmkit_host
from lmkit_testing.world import World

__all__ = ["dist_dir", "lmkit_host"]


@pytest.fixture
def world(dist_dir: DistDir) -> World:
    return World(dist_dir.path)


@pytest.fixture
def whole(world: World) -> World:
    """A world in which everything resolves."""
    return world.everything()
