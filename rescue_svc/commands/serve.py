"""Run the service."""

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import uvicorn

from http_limits.connections import ListeningServer, open_listener, server_config, url_of
from http_limits.service_socket import SOCKET, private_listener
from rescue_svc import logs
from rescue_svc.app import create_app
from rescue_svc.ephemeral import ephemeral_folder, make_permanent
from rescue_svc.errors import SettingsError
from rescue_svc.service import RescueService
from rescue_svc.settings import Settings

log = logging.getLogger(__name__)

GRACE_S = 10
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run(settings: Settings) -> None:
    """Serve until a signal; the store is sealed at the end, or deleted if it is ephemeral."""
    logs.configure(settings.log_level)
    shutdown = Shutdown()
    if settings.ephemeral:
        shutdown.handle_signals()  # before the first file: a signal in between would leave it
        shutdown.follow_stdin()
        with ephemeral_folder(settings) as private_settings:
            _listen_and_serve(private_settings, shutdown)
    else:
        _listen_and_serve(settings, shutdown)
    if shutdown.by_ctrl_c:
        raise KeyboardInterrupt


class Shutdown:
    """Remembers a request to end, and passes it to the server.

    It raises no exception in running code, so that sealing and deleting are completed, even after a second signal.
    """

    def __init__(self) -> None:
        self.by_ctrl_c = False
        self._is_requested = False
        self._server: uvicorn.Server | None = None

    def handle_signals(self) -> None:
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # such as SIGHUP under nohup
                signal.signal(number, lambda number, _: self._request(number))

    def follow_stdin(self) -> None:
        """End with standard input, a pipe whose other end closes when the parent ends or is killed."""

        def watch() -> None:
            with suppress(OSError):  # such as a terminal that was closed
                while os.read(0, 4096):
                    pass
            self._request()

        threading.Thread(target=watch, daemon=True).start()

    def serve(self, server: uvicorn.Server, listeners: list[socket.socket]) -> None:
        self._server = server  # before the check: a signal between the two reaches the server
        if not self._is_requested:
            server.run(sockets=listeners)

    def _request(self, number: int | None = None) -> None:
        self._is_requested = True
        self.by_ctrl_c |= number == signal.SIGINT
        if self._server is not None:
            self._server.should_exit = True


def _listen_and_serve(settings: Settings, shutdown: Shutdown) -> None:
    try:
        listener = open_listener(settings.host, settings.port)
    except OSError as error:
        raise SettingsError(
            f"cannot listen on {settings.host} port {settings.port} ({error.strerror}); set --port or free it"
        ) from error
    with listener:
        service = RescueService(settings)
        shutdown.handle_signals()
        try:
            if not settings.ephemeral and settings.store is None:
                make_permanent(settings.data_dir)
            options = {"lifespan": "off", "timeout_graceful_shutdown": GRACE_S}
            config = server_config(create_app(service), settings.max_in_flight, **options)
            fields = {"url": url_of(listener), "store": service.store.describe()}
            with _user_sockets(settings) as sockets:
                fields["connections"] = config.http.max_connections  # type: ignore[union-attr]
                server = ListeningServer(config, lambda: log.info("listening", extra=fields))
                shutdown.serve(server, [listener, *sockets])
        finally:
            service.close()
            log.info("closed")


@contextmanager
def _user_sockets(settings: Settings) -> Iterator[list[socket.socket]]:
    """Yield the socket by which other programs of the user find the service.

    None on PostgreSQL, where a service has no folder of its own, or if the path is too long for a socket.
    """
    with ExitStack() as stack:
        sockets: list[socket.socket] = []
        if settings.store is None:
            try:
                sockets.append(stack.enter_context(private_listener(settings.data_dir / SOCKET)))
            except OSError as error:
                log.warning("`--rescue auto` and `forget` do not find this service", extra={"reason": str(error)})
        yield sockets
