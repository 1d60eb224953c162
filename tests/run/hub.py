"""A stand-in for the Hugging Face hub: the requests that its client makes to push and to fetch.

    python -m tests.run.hub

serves one on this machine until it is interrupted, and prints the variables that lead commands to
it. What is pushed is kept in memory.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_of_a_test"
LARGE = (".safetensors", ".parquet")  # stored by LFS


class Hub:
    """Repositories by type and name, each with its commits (files by path), oldest first.

    Attributes:
        repositories: `{("model", "me/own"): {commit: {path: content}}}`.
        private: whether each is.
    """

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], dict[str, dict[str, bytes]]] = {}
        self.private: dict[tuple[str, str], bool] = {}
        self.stored: dict[str, bytes] = {}  # large files by their SHA-256
        self.endpoint = ""

    def files(self, kind: str, name: str, revision: str = "main") -> dict[str, bytes]:
        commits = self.repositories[kind, name]
        return commits[[*commits][-1] if revision == "main" else revision]

    def has(self, kind: str, name: str, revision: str | None) -> bool:
        commits = self.repositories.get((kind, name), {})
        return bool(commits) and (revision in (None, "main") or revision in commits)

    def commit(self, kind: str, name: str, lines: list[dict[str, Any]]) -> str:
        commits = self.repositories[kind, name]
        files = dict([*commits.values()][-1]) if commits else {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.stored[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        oid = hashlib.sha1(repr((len(commits), sorted(files))).encode()).hexdigest()
        commits[oid] = files
        return oid


class Handler(BaseHTTPRequestHandler):
    """Answers of the hub; `hub` is set by `served_hub`."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def answer(self, content: Any, status: int = 200, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_PUT(self) -> None:
        data = self.body()
        self.hub.stored[self.path.rpartition("/")[2]] = data
        assert hashlib.sha256(data).hexdigest() in self.path
        self.answer({})

    def do_POST(self) -> None:
        data, path = self.body(), self.path.partition("?")[0]
        if f"Bearer {TOKEN}" != self.headers.get("Authorization"):
            return self.answer({"error": "Invalid credentials"}, 401)
        if path == "/api/repos/create":
            return self.create(json.loads(data))
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if found := re.fullmatch(r"/api/(model|dataset)s/(.+)/(preupload|commit)/main", path):
            kind, name, what = found.groups()
            if what == "commit":
                oid = self.hub.commit(kind, name, [json.loads(x) for x in data.splitlines()])
                url = f"{self.hub.endpoint}/{name}/commit/{oid}"
                return self.answer({"commitUrl": url, "commitOid": oid, "success": True})
            files = [
                {"path": f["path"], "shouldIgnore": False, "oid": None}
                | {"uploadMode": "lfs" if f["path"].endswith(LARGE) else "regular"}
                for f in json.loads(data)["files"]
            ]
            return self.answer({"files": files})
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                o | {"actions": {"upload": {"href": f"{self.hub.endpoint}/stored/{o['oid']}"}}}
                for o in json.loads(data)["objects"]
            ]
            return self.answer({"transfer": "basic", "objects": objects})
        return self.answer({"error": f"no such place: {path}"}, 404)

    def create(self, given: dict[str, Any]) -> None:
        name = "/".join(filter(None, (given.get("organization"), given["name"])))
        key = (given.get("type") or "model", name)
        if name.startswith("others/"):
            return self.answer({"error": "You don't have the rights to create it"}, 403)
        if key in self.hub.repositories:
            return self.answer({"error": "exists", "url": f"{self.hub.endpoint}/{name}"}, 409)
        self.hub.repositories[key] = {"0" * 39 + "1": {".gitattributes": b""}}
        self.hub.private[key] = given.get("visibility") == "private"
        return self.answer({"url": f"{self.hub.endpoint}/{name}", "name": name})

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if found := re.fullmatch(
            r"/api/(model|dataset)s/(.+?)(?:/(revision|tree)/([^/]+)(/.+)?)?", path
        ):
            kind, name, what, revision, inner = found.groups()
            if not self.hub.has(kind, name, revision):
                return self.missing()
            files = self.hub.files(kind, name, revision or "main")
            [sha] = [c for c, f in self.hub.repositories[kind, name].items() if f is files]
            if what == "tree":
                under = [p for p in files if p.startswith((inner or "/")[1:])]
                if inner and not under:
                    return self.answer({"error": "none"}, 404, X_Error_Code="EntryNotFound")
                return self.answer([self.entry(p, files[p]) for p in under])
            siblings = [{"rfilename": each} for each in files]
            return self.answer({"id": name, "sha": sha, "siblings": siblings, "private": False})
        if found := re.fullmatch(r"/(datasets/)?(.+)/resolve/([^/]+)/(.+)", path):
            kind = "dataset" if found[1] else "model"
            name, revision, file = found.groups()[1:]
            if not self.hub.has(kind, name, revision):
                return self.missing()
            files = self.hub.files(kind, name, revision)
            [sha] = [c for c, f in self.hub.repositories[kind, name].items() if f is files]
            if file not in files:
                missing = {"X_Error_Code": "EntryNotFound", "X_Repo_Commit": sha}
                return self.answer({"error": "Entry not found"}, 404, **missing)
            etag = hashlib.sha256(files[file]).hexdigest()
            return self.answer(files[file], ETag=f'"{etag}"', X_Repo_Commit=sha)
        return self.answer({"error": f"no such place: {path}"}, 404)

    def missing(self) -> None:
        self.answer({"error": "not found"}, 404, X_Error_Code="RevisionNotFound")

    do_HEAD = do_GET

    @staticmethod
    def entry(path: str, content: bytes) -> dict[str, Any]:
        digest = hashlib.sha1(content).hexdigest()
        return {"type": "file", "path": path, "size": len(content), "oid": digest}


@contextmanager
def served_hub() -> Iterator[Hub]:
    """A hub on a free port of this machine."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield hub
    server.shutdown()
    server.server_close()


if __name__ == "__main__":
    with served_hub() as own:
        where = f"HF_ENDPOINT={own.endpoint} HF_TOKEN={TOKEN}"
        print(f"export {where} HF_HUB_DISABLE_XET=1 NO_PROXY=127.0.0.1", flush=True)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()
