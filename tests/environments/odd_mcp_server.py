"""An MCP server over stdio that takes liberties with the protocol: `odd_mcp_server.py KIND`."""

import json
import sys

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
        "additionalProperties": KIND == "open",
    },
}


def answered(method, parameters):
    if method == "initialize":
        version = parameters["protocolVersion"]
        about = {"name": "odd", "version": "1"}
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
    if method == "tools/list":
        return {"tools": [TOOL] * (2 if KIND == "twice" else 1)}
    if method != "tools/call":
        return None
    if KIND == "silent":
        return {"content": [], "isError": True}
    if KIND == "broken":
        return {"content": "a text"}
    return {"content": [{"type": "text", "text": json.dumps(parameters["arguments"])}]}


for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        result = answered(asked["method"], asked.get("params"))
        failed = {"error": {"code": -32601, "message": "unknown"}}
        told = failed if result is None else {"result": result}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **told}), flush=True)
