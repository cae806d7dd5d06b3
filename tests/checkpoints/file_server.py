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
        seafile: Answers as Seafile 11 does: without an ETag, and changed a moment ago.
        without_length: No Content-Length: only the end of the connection ends the file.
        shifted: A partial answer begins as many bytes later than it was asked for.
        busy: Statuses of the next answers, such as 429, each with Retry-After.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    address: str = ''
    seafile: bool = False
    without_length: bool = False
    shifted: int = 0
    busy: list[int] = field(default_factory=list)


@contextmanager
def serve(share: Share) -> Iterator[Share]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            ranged = self.headers.get('Range')
            share.requests.append((self.path, ranged))
            _, kind, name, *_ = self.path.split('/')
            if share.busy:
                self.send_response(share.busy.pop(0))
                self.send_header('Retry-After', '1')
                self.end_headers()
            elif name not in share.files:
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
            same = share.seafile or self.headers.get('If-Range') == tag
            start = int(ranged[6:-1]) + share.shifted if ranged and same else 0
            self.send_response(206 if start else 200)
            if share.seafile:
                self.send_header('Last-Modified', self.date_time_string())
            else:
                self.send_header('ETag', tag)
            if start:
                self.send_header('Content-Range', f'bytes {start}-{len(body) - 1}/{len(body)}')
            if not share.without_length:
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
