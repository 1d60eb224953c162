"""A chat completions server in a process of its own: `python server.py LOG`.

It prints its port. A reply depends on the prompt alone: judges and agents answer A if the letters
of the prompt sum to an even number, and arguments quote the article's first sentence. Every request
appends a line to LOG when it is answered.
"""

import json
import re
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

DELAY_S = 0.005  # so that a kill falls between two replies


def mind(prompt: str) -> str:
    if "Write your argument" in prompt:
        sentence = prompt.split("Article:\n")[1].split(".")[0]
        return f"<think>hm</think>See <quote>{sentence}.</quote> and <quote>made up</quote>."
    if "Ask one short question" in prompt:
        return "Which passage?"
    letters = sum(map(ord, re.sub(r"\s", "", prompt)))
    return f"Answer: {'AB'[letters % 2]}"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(DELAY_S)
        prompt = asked["messages"][-1]["content"]
        if "REFUSED" in self.path:
            self.respond(401, b"no key")
            return
        if "BROKEN" in prompt:
            self.respond(400, b"no")
            return
        message = {"role": "assistant", "content": mind(prompt)}
        with open(sys.argv[1], "a") as log:
            log.write(json.dumps([asked["seed"], prompt]) + "\n")
        usage = {"completion_tokens": len(message["content"].split())}
        body = {"choices": [{"index": 0, "message": message}], "usage": usage}
        self.respond(200, json.dumps(body).encode())

    def respond(self, code: int, content: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
