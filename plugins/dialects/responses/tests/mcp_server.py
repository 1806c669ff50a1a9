"""An MCP server for tests; as a program, over its standard input and output."""

from __future__ import annotations

import os

from mcp.server.mcpserver import MCPServer

server = MCPServer("tests")


@server.tool()
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


@server.tool()
def fail(why: str) -> str:
    """Always fails."""
    raise ValueError(why)


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(1)


@server.tool()
def long(num: int) -> str:
    """So many characters."""
    return "x" * num


if __name__ == "__main__":
    server.run("stdio")
