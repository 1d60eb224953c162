#!/usr/bin/env bash
# mcp 2.3.0: the text of a tool's exception does not reach the client, unless it is a ToolError.
#
# Expected: a tool that raises ValueError("no such item; choose tea or salt") tells the model so.
# Seen: "Error executing tool price", and nothing else. A ToolError's text is passed on.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'mcp==2.3.0'
"$folder/venv/bin/python" - <<'PYTHON'
import asyncio
import sys
import tempfile

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

SERVER = '''
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("shop")

@server.tool()
def price(item: str) -> int:
    raise ValueError("no such item; choose tea or salt")

@server.tool()
def stock(item: str) -> int:
    raise ToolError("no such item; choose tea or salt")

server.run()
'''


async def main() -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(SERVER)
        file.flush()
        parameters = StdioServerParameters(command=sys.executable, args=[file.name])
        async with stdio_client(parameters) as streams, ClientSession(*streams) as session:
            await session.initialize()
            texts = {}
            for tool in ("price", "stock"):
                result = await session.call_tool(tool, {"item": "rope"})
                texts[tool] = result.content[0].text
    print(texts)
    assert "choose tea" not in texts["price"], "a ValueError's text reaches the client now"
    assert "choose tea" in texts["stock"]


asyncio.run(main())
PYTHON
