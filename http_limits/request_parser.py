"""Parsing of requests that offer to change the protocol."""

from typing import Any

from httptools import HttpParserUpgrade, HttpRequestParser


class RequestParser:
    """Parse requests as httptools does, including the body of one that offers to change the protocol.

    Java's HTTP client sends `Upgrade: h2c` with every request. A server may ignore that (RFC 9110, 7.8), but httptools
    stops after the head. Such a request is parsed again without the offer: its callbacks up to `on_message_complete`
    come twice, and `offers_upgrade` is true the first time.
    """

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol  # has the `url` and the `headers` of the last head
        self._parser = self._new_parser()

    def _new_parser(self) -> HttpRequestParser:
        parser = HttpRequestParser(self._protocol)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        return parser

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    @property
    def offers_upgrade(self) -> bool:
        return bool(self._parser.should_upgrade()) and self._parser.get_method() != b"CONNECT"

    def feed_data(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            if not self.offers_upgrade:
                raise
            end_of_head = upgrade.args[0]
            line = b"%s %s HTTP/%s" % (
                self._parser.get_method(),
                self._protocol.url,
                self._parser.get_http_version().encode(),
            )
            headers = (b"%s: %s" % header for header in self._protocol.headers if header[0] != b"upgrade")
            self._parser = self._new_parser()
            self.feed_data(b"\r\n".join([line, *headers, b"", b""]) + data[end_of_head:])
