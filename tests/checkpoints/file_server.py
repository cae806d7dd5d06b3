"""A server of files as public shares are: redirects, Content-Disposition, Range, breaks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


@dataclass
class Share:
    """Files by name; `/f/NAME/?dl=1` redirects to `/files/NAME`.

    Attributes:
        cuts: Bytes of the body after which each of the next transfers breaks.
        requests: Path and Range of every request.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    address: str = ''


@contextmanager
def serve(share: Share) -> Iterator[Share]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            ranged = self.headers.get('Range')
            share.requests.append((self.path, ranged))
            _, kind, name, *_ = self.path.split('/')
            if name not in share.files:
                self.send_error(404)
            elif kind == 'f':
                self.send_response(302)
                self.send_header('Location', f'/files/{name}')
                self.end_headers()
            else:
                self.send_file(name, share.files[name], ranged)

        def send_file(self, name: str, body: bytes, ranged: str | None) -> None:
            # Before the headers, after which the client may make its next request.
            end = share.cuts.pop(0) if share.cuts else len(body)
            tag = f'"{hash(body)}"'
            start = int(ranged[6:-1]) if ranged and self.headers.get('If-Range') == tag else 0
            self.send_response(206 if start else 200)
            self.send_header('ETag', tag)
            self.send_header('Content-Length', str(len(body) - start))
            self.send_header('Content-Disposition', f'attachment; filename="other-{name}"')
            self.end_headers()
            self.wfile.write(body[start:end])

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(('127.0.0.1', 0), Handler) as http:
        share.address = f'http://127.0.0.1:{http.server_port}'
        thread = Thread(target=http.serve_forever)
        thread.start()
        try:
            yield share
        finally:
            http.shutdown()
            thread.join()
