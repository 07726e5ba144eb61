"""A small HTTP server on loopback that serves files in ranges, or does one of the things that servers should not."""

import ssl
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

STATUSES = {
    "absent": (404, {}),
    "forbidden": (403, {}),
    "unsatisfiable": (416, {}),
    "error": (500, {}),
    "away": (503, {"Retry-After": "77"}),
    "too many": (429, {"Retry-After": "Fri, 31 Dec 2099 23:59:59 GMT"}),
    "odd": (299, {}),
}


@dataclass(kw_only=True)
class Files:
    """What is served, and how."""

    content: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """Path → content."""
    manner: str = "good"
    at_first: bool = False
    """Whether the first byte, which is asked for before all else, is answered in that manner, too."""
    after: int = 0
    """Requests that are answered as they should be before that."""
    target: str = ""
    """Where redirects go."""
    certificate: tuple[str, str] | None = None
    """Files of a certificate and its key: serve over TLS."""
    ranges: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Ranges asked for."""
    url: str = ""
    ended: threading.Event = field(default_factory=threading.Event)


@contextmanager
def serving_files(**settings: object) -> Generator[Files]:
    """Serve for the length of the block."""
    files = Files(**settings)  # pyright: ignore[reportArgumentType]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            del format, args

        def do_GET(self) -> None:
            try:
                _answer(self, files)
            except OSError:
                self.close_connection = True

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            del request, client_address  # Such as a client that does not like our certificate.

    server = Server(("127.0.0.1", 0), Handler)
    scheme = "http"
    if files.certificate is not None:
        scheme = "https"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*files.certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    files.url = f"{scheme}://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield files
    finally:
        files.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _answer(request: BaseHTTPRequestHandler, files: Files) -> None:
    content = files.content.get(request.path)
    if files.manner == "redirect":
        target = files.target or f"{files.url}{request.path}"
        return _send(request, 302, b"", {"Location": target.replace("PATH", request.path)})
    if content is None:
        return _send(request, 404, b"nothing here", {})
    first, last = (int(n) for n in request.headers["Range"].removeprefix("bytes=").split("-"))
    assert request.headers["Accept-Encoding"] == "identity"
    files.ranges.append((first, last))
    body = content[first : last + 1]
    headers = {"Content-Range": f"bytes {first}-{last}/{len(content)}"}
    turned = len(files.ranges) > files.after and (last > first or files.at_first)
    manner = files.manner if turned else "good"
    if manner in STATUSES:
        status, extra = STATUSES[manner]
        return _send(request, status, b"no", extra)
    return _send_range(request, files, manner, content, first, body, headers)


def _send_range(
    request: BaseHTTPRequestHandler,
    files: Files,
    manner: str,
    content: bytes,
    first: int,
    body: bytes,
    headers: dict[str, str],
) -> None:
    match manner:
        case "whole":
            _send(request, 200, content, {})
        case "other range":
            last = first + len(body)
            _send(request, 206, body, {"Content-Range": f"bytes {first + 1}-{last}/{len(content)}"})
        case "no range":
            _send(request, 206, body, {})
        case "other size":
            _send(request, 206, body, {"Content-Range": headers["Content-Range"] + "0"})
        case "other length":
            _send(request, 206, body[1:], headers)
        case "wrong bytes":
            _send(request, 206, b"\xff" * len(body), headers)
        case "gzip":
            _send(request, 206, body, {**headers, "Content-Encoding": "gzip"})
        case "truncated":
            request.close_connection = True
            _send(request, 206, body[:-7], {**headers, "Content-Length": str(len(body))})
        case "short":
            request.close_connection = True
            _begin(request, 206, {**headers, "Connection": "close"})
            request.wfile.write(body[:-7])
        case "drip":
            _begin(request, 206, {**headers, "Content-Length": str(len(body))})
            for byte in body:
                request.wfile.write(bytes([byte]))
                if files.ended.wait(0.2):
                    return
        case "endless":
            request.close_connection = True
            _begin(request, 206, {**headers, "Transfer-Encoding": "chunked"})
            while not files.ended.is_set():
                request.wfile.write(b"%x\r\n" % len(body) + body + b"\r\n")
        case "endless head":
            request.close_connection = True
            request.wfile.write(b"HTTP/1.1 206 Partial Content\r\n")
            while not files.ended.is_set():
                request.wfile.write(b"X-More: " + b"x" * 1000 + b"\r\n")
        case "no HTTP":
            request.close_connection = True
            request.wfile.write(b"SSH-2.0-OpenSSH_9.9\r\n")
        case "silent":
            files.ended.wait(30)
        case "hangs up":
            request.close_connection = True
        case _:
            _send(request, 206, body, headers)


def _begin(request: BaseHTTPRequestHandler, status: int, headers: dict[str, str]) -> None:
    request.send_response(status)
    for name, value in headers.items():
        request.send_header(name, value)
    request.end_headers()


def _send(request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]) -> None:
    _begin(request, status, {"Content-Length": str(len(body)), **headers})
    request.wfile.write(body)
