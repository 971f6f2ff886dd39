"""Stand-in for the Hugging Face hub: what an upload asks it for, over HTTP on this machine."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub:
    """Content of the hub.

    Attributes:
        endpoint: its address.
        files: {repository@revision: {file: bytes}}. public: names of repositories.
        private, tokens, messages: of what was asked, in order.
        failing: {part of a path: (status, message) that it answers}.
    """

    def __init__(self) -> None:
        self.endpoint = ""
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: list[bool] = []
        self.public: set[str] = set()
        self.tokens: list[str | None] = []
        self.messages: list[str] = []
        self.failing: dict[str, tuple[int, str]] = {}
        self.objects: dict[str, bytes] = {}

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Status and JSON of a request."""
        for part, (status, message) in self.failing.items():
            if part in path:
                return status, {"error": message}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = "/".join(filter(None, (asked.get("organization") or "me", asked["name"])))
            self.private.append(asked.get("visibility") == "private" or bool(asked.get("private")))
            return 200, {"url": f"{self.endpoint}/{name}", "name": name}
        if path == "/api/validate-yaml":
            wrong = "license: nonsense" in json.loads(body)["content"]
            said = [{"message": '"license" must be one of'}] if wrong else []
            return 400 if wrong else 200, {"error": "invalid metadata", "errors": said, "warnings": []}
        if re.fullmatch(r"/api/models/[^/]+/[^/]+/branch/[^/]+", path):
            return 200, {}
        if re.fullmatch(r"/api/models/[^/]+/[^/]+/preupload/[^/]+", path):
            asked = json.loads(body)["files"]
            mode = {True: "lfs", False: "regular"}
            return 200, {
                "files": [
                    {
                        "path": f["path"],
                        "uploadMode": mode[f["path"].endswith(".safetensors")],
                        "shouldIgnore": False,
                        "oid": None,
                    }
                    for f in asked
                ]
            }
        if found := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            objects = json.loads(body)["objects"]
            actions = [
                {**each, "actions": {"upload": {"href": f"{self.endpoint}/lfs/{each['oid']}"}}} for each in objects
            ]
            return 200, {"transfer": "basic", "objects": actions}
        if method == "PUT" and path.startswith("/lfs/"):
            self.objects[path.removeprefix("/lfs/")] = body
            return 200, {}
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/([^/]+)", path):
            return 200, self._commit(f"{found[1]}@{found[2]}", [json.loads(line) for line in body.splitlines()])
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/.*)?", path):
            return 200, {"id": found[1], "sha": "0" * 40, "siblings": [], "private": found[1] not in self.public}
        return 404, {"error": f"{method} {path}"}

    def _commit(self, place: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
        held = self.files.setdefault(place, {})
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.messages.append(value["summary"])
            elif line["key"] == "file":
                held[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                held[value["path"]] = self.objects[value["oid"]]
        return {
            "success": True,
            "commitOid": "1" * 40,
            "commitUrl": f"{self.endpoint}/{place.partition('@')[0]}/commit/{'1' * 40}",
        }


@contextmanager
def serve() -> Iterator[Hub]:
    """A hub that answers until the context is left."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.tokens.append(self.headers.get("Authorization"))
            status, answer = hub.answer(self.command, self.path.partition("?")[0], body)
            content = json.dumps(answer).encode()
            self.send_response(status)
            if status >= 400:
                self.send_header("X-Error-Message", answer["error"])
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_HEAD = _handle  # noqa: N815

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
