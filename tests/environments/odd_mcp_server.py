"""An MCP server over stdio that takes liberties with the protocol: `odd_mcp_server.py KIND`."""

import json
import sys
from pathlib import Path

KIND = sys.argv[1]
PROPERTIES = {
    "any": {"x": True},
    "type": {"x": {"type": "int"}},
    "pattern": {"x": {"type": "string", "pattern": "("}},
    "null": None,
}
TOOL = {
    "name": "echo",
    "inputSchema": {
        "type": "object",
        "properties": PROPERTIES.get(KIND, {}),
        "additionalProperties": KIND in ("open", "result", "refused"),
    },
}
calls = []
BARE = [
    {"name": "a", "inputSchema": {"type": "object"}},
    {"name": "b", "title": "B", "inputSchema": {"type": "object"}},
    {"name": "c", "title": "C", "description": "Do c.", "inputSchema": {"type": "object"}},
]


def listed(cursor):
    """The tools; of pages, the second has the third's cursor."""
    if KIND == "pages":
        page = int(cursor or 1)
        after = {"nextCursor": str(page + 1)} if page < 3 else {}
        return {"tools": [{**TOOL, "name": f"echo{page}"}], **after}
    return {"tools": {"twice": [TOOL] * 2, "none": [], "bare": BARE}.get(KIND, [TOOL])}


def answered(method, parameters):
    if method == "initialize":
        version = parameters["protocolVersion"]
        about = {"name": "odd", "version": "1"}
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
    if method == "tools/list" and KIND != "unlisted":
        return listed((parameters or {}).get("cursor"))
    if method != "tools/call":
        return None
    if KIND == "result":
        return parameters["arguments"]
    if KIND == "count":
        calls.append(parameters)
        return {"content": [{"type": "text", "text": str(len(calls))}]}
    if KIND == "silent":
        return {"content": [], "isError": True}
    if KIND == "broken":
        return {"content": "a text"}
    return {"content": [{"type": "text", "text": json.dumps(parameters["arguments"])}]}


if KIND == "once":
    try:
        Path(sys.argv[2]).touch(exist_ok=False)
    except FileExistsError:
        sys.exit("not again")
if KIND == "loud":
    sys.exit("x" + "y" * 300)
for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked and KIND != "mute":
        result = answered(asked["method"], asked.get("params"))
        code = -32601
        if KIND == "refused" and asked["method"] == "tools/call":
            code, result = asked["params"]["arguments"]["code"], None
        failed = {"error": {"code": code, "message": "unknown"}}
        told = failed if result is None else {"result": result}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **told}), flush=True)
