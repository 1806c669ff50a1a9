"""An MCP server over standard input and output, for answers of `lmkit serve demo`. It runs where lmkit does."""

from __future__ import annotations

import json

from mcp.server.mcpserver import MCPServer

server = MCPServer("weather")


@server.tool()
def get_weather(city: str) -> str:
    """Get the current weather in a city"""
    return json.dumps({"city": city, "temperature": 21})


if __name__ == "__main__":
    server.run("stdio")
