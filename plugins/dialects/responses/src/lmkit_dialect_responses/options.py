"""Options of the dialect."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    mcp: str = ""  # a file that names the MCP servers whose tools answers may use; "": there are none
    mcp_seconds: float = 60.0  # that a call of such a tool may take

    def __post_init__(self) -> None:
        if not 0 < self.mcp_seconds <= 3600:
            raise ValueError("mcp_seconds is more than 0 and at most 3600")
