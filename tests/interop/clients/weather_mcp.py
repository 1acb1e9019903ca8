"""An MCP server with one tool, over standard input and output. What it is asked goes to a file.

    weather_mcp.py FILE
"""

import json
import sys

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "get_weather", "description": "Weather of a city.", "inputSchema": CITY}


def answer(method, parameters):
    if method == "initialize":
        server = {"name": "weather", "version": "1"}
        version = parameters["protocolVersion"]
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server}
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        city = parameters["arguments"]["city"]
        with open(sys.argv[1], "a") as asked:
            asked.write(city + "\n")
        return {"content": [{"type": "text", "text": f"snow in {city}"}]}
    return None


for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue
    result = answer(request["method"], request.get("params", {}))
    reply = {"result": result} if result is not None else {"error": {"code": -32601, "message": "unknown method"}}
    print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **reply}), flush=True)
