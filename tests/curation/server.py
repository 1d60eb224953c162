"""A chat completions server on this machine, whose answers and failures a test chooses."""

import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

STALL_S = 600  # far above any time limit in the tests


class Reply:
    """A server's whole reaction to a request, in place of an answer."""

    def __init__(self, act):
        self.act = act


def status(code, text="no", **headers):
    return Reply(lambda handler, server: handler.respond(text.encode(), code, headers))


def body(raw):
    return Reply(lambda handler, server: handler.respond(raw, 200, {}))


STALL = Reply(lambda handler, server: server.closing.wait(STALL_S))
HANG_UP = Reply(lambda handler, server: handler.connection.close())


def _die(handler, server):
    handler.respond(b'{"choices": [{"message": {"con', 200, {}, length=1000)
    handler.close_connection = True


def _blanks(handler, server):
    handler.respond(b"\n", 200, {}, length=10_000)
    while not server.closing.wait(0.05):
        handler.wfile.write(b"\n")  # raises once the client has closed the connection
        handler.wfile.flush()


DIE, BLANKS = Reply(_die), Reply(_blanks)


class Server:
    """Serves until the end of a `with`.

    Args:
        mind: (body of the request, number of earlier requests with the same body) → text, message
            or Reply.
    """

    def __init__(self, mind):
        self.mind = mind
        self.seen = Counter()
        self.requests = []  # (time, body, headers)
        self.closing = threading.Event()
        self.lock = threading.Lock()

    def __enter__(self):
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                server.serve(self)

            def respond(self, content, code, headers, length=None):
                self.send_response(code)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), str(value))
                self.send_header("Content-Length", str(length or len(content)))
                self.end_headers()
                self.wfile.write(content)
                self.wfile.flush()

            def log_message(self, *_):
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_):
                pass  # the client was killed, or gave up

        self.http = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.closing.set()
        self.http.shutdown()
        self.http.server_close()

    def serve(self, handler):
        raw = handler.rfile.read(int(handler.headers["Content-Length"]))
        asked = json.loads(raw)
        with self.lock:
            before = self.seen[raw]
            self.seen[raw] += 1
            self.requests.append((time.monotonic(), asked, handler.path, dict(handler.headers)))
        reply = self.mind(asked, before)
        if isinstance(reply, Reply):
            reply.act(handler, self)
            return
        message = reply if isinstance(reply, dict) else {"role": "assistant", "content": reply}
        usage = {"completion_tokens": len(str(message["content"]).split())}
        completion = {"choices": [{"index": 0, "message": message}], "usage": usage}
        handler.respond(json.dumps(completion).encode(), 200, {})
