"""A rollout server for the worker's tests: a thread that answers the generate endpoint."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

from ajgrpo.inference import protocol
from ajgrpo.inference.protocol import GenerateRequest
from tests.rollout.fakes import reply


class TinyServer(http.server.ThreadingHTTPServer):
    """Answers request n with the text ``n mod 2``, sampled under weights 3.

    Attributes:
        requests: all requests so far.
        url: its address.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[GenerateRequest] = []
        self._lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        request = GenerateRequest.from_json(body)
        with self._lock:
            number = len(self.requests)
            self.requests.append(request)
        return reply(str(number % 2), version="3").to_json("id", request.model, len(request.token_ids))


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        assert isinstance(self.server, TinyServer)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, answer = 404, protocol.error_body("Not Found", 404)
        if self.path == protocol.GENERATE:
            status, answer = 200, self.server.answer(body)
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@contextlib.contextmanager
def tiny_server() -> Iterator[TinyServer]:
    """A running server."""
    with TinyServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
