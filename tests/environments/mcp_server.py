"""A small MCP server, `python mcp_server.py [PORT]`: over stdio, or at an address."""

import base64
import os
import sys
import time
from pathlib import Path

from mcp.server import MCPServer
from mcp.server.mcpserver import Image
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import BlobResourceContents, EmbeddedResource

server = MCPServer("desk")
notes: dict[str, list[int]] = {}
SQUARE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAABwAAAAcCAIAAAD9b0jDAAAAJ0lEQVR4nGO8IyfHQG3ARHUTRw0dNXTU0FFDRw0d"
    "NXTU0FFDB6WhADfvAVAeqH4nAAAAAElFTkSuQmCC"
)


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def put(key: str, value: list[int]) -> dict[str, list[int]]:
    """Keep numbers under a key; returns all that are kept."""
    notes[key] = value
    return notes


@server.tool()
def look(kind: str) -> list:
    """Look at a red square."""
    if kind == "resource":
        blob = base64.b64encode(SQUARE).decode()
        held = BlobResourceContents(uri="file:///a.png", mime_type="image/png", blob=blob)
        return ["Held:", EmbeddedResource(type="resource", resource=held)]
    if kind == "drawing":
        return ["Drawn:", Image(data=b"<svg/>", format="svg+xml")]
    if kind == "broken":
        return [Image(data=SQUARE[:40], format="png")]
    return ["Left:", Image(data=SQUARE, format="png"), "right:", Image(data=SQUARE, format="png")]


@server.tool()
def fail(kind: str) -> str:
    """Fail."""
    if kind == "end":
        os._exit(3)
    if kind == "hang":
        time.sleep(60)
    if kind == "told":
        raise ToolError("use it otherwise")
    raise OSError("the disk")


if __name__ == "__main__":
    if listing := os.environ.get("MCP_STARTS"):
        with Path(listing).open("a") as file:
            print(os.getpid(), file=file)
    if "--broken" in sys.argv:
        sys.exit("no configuration")
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
