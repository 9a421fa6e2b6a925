"""`ModelPool`: the models of a server. Models load on demand; the least recently used one is unloaded."""

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Thread
from typing import Any, TypeVar

import mlx.core as mx
from mlx_lm.utils import maybe_set_recommended_wired_limit

from mlx_tq.cli.screen import human_bytes
from mlx_tq.errors import ConfigError, MlxTqError
from mlx_tq.server.api_errors import ApiError, ModelNotFoundError, QueueFullError, UnavailableError
from mlx_tq.server.metrics import Metrics
from mlx_tq.server.model_service import ModelService

log = logging.getLogger(__name__)

DEFAULT_MODEL = "default_model"  # what clients of mlx-lm's server call the model that it was started with

_LOADER_GRACE_S = 1
_IDLE_CHECKS = 10  # in the time after which an idle model is unloaded

Result = TypeVar("Result")


@dataclass(eq=False)
class PooledModel:
    """A model of a pool; `service` is None while it is not loaded."""

    name: str
    load: Callable[[], ModelService]  # takes long, and runs in a thread
    metrics: Metrics = field(default_factory=Metrics)
    nbytes: int = 0  # of weights and KV caches; an estimate until it was loaded
    weights_nbytes: int = 0  # of its files until it was loaded
    context_length: int | None = None  # as its configuration says
    service: ModelService | None = None
    is_unloading: bool = False  # takes no further requests
    waiting: list[asyncio.Future[ModelService]] = field(default_factory=list)  # requests, until it is loaded
    loading: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.metrics.waiting_for_model.set_function(lambda: len(self.waiting))

    @property
    def positions(self) -> int | None:
        return self.context_length if self.service is None else self.service.positions

    @property
    def has_waiting(self) -> bool:
        return any(not request.done() for request in self.waiting)


class ModelPool:
    """Loads models, one at a time, and unloads them; on one event loop. The first model is the default.

    All loaded models take at most `limit` bytes, weights and KV caches together; None is no limit. A model that is
    unloaded first finishes the requests that it has, while later ones wait for their turn to load it again. Models
    that do not fit together take turns; no model is starved. At most `max_waiting` requests wait. A model without
    sessions that was not used for `idle_release` seconds is unloaded.
    """

    def __init__(
        self,
        models: Sequence[PooledModel],
        limit: int | None = None,
        max_waiting: int = 1,
        idle_release: float | None = None,
    ) -> None:
        self.models, self._limit, self._max_waiting, self._idle_release = models, limit, max_waiting, idle_release
        self.created = int(time.time())
        self._turn = asyncio.Lock()  # of the models that wait to be loaded
        self._changed = asyncio.Event()  # a model is used by one request less, or one less waits
        self._thread: Thread | None = None  # loads or unloads
        self._is_stopping = False
        self.is_ready = False  # whether the first model was loaded
        self._idle_task: asyncio.Task[None] | None = None

    # The start and the end.

    async def start(self) -> None:
        """Load the first model, for which requests wait meanwhile; raise what prevents that."""
        if len(self.models) > 1:
            # Each batch of mlx-lm sets this limit and later restores it, which then changes nothing for other models.
            maybe_set_recommended_wired_limit()
        model = self.models[0]
        self._refuse_too_large(model)
        try:
            async with self._turn:
                await self._load_service(model)
        except UnavailableError as error:  # it takes more than its files say
            raise ConfigError(str(error)) from error
        self.is_ready = model.service is not None
        if self._idle_release is not None:
            self._idle_task = asyncio.create_task(self._release_idle(self._idle_release))

    def _refuse_too_large(self, model: PooledModel) -> None:
        if fault := self._size_fault(model):
            raise ConfigError(fault)

    def stop(self) -> None:
        """End all answers with an error and refuse further requests. Only the event loop may call this."""
        self._is_stopping = True
        if self._idle_task is not None:
            self._idle_task.cancel()
        for service in self.services:
            service.engine.stop()
        for model in self.models:
            self._fail(model, "the server is stopping")

    def close(self, timeout: float) -> None:
        """End all engines and what is being loaded, waiting at most `timeout` seconds, after the event loop's end."""
        deadline = time.monotonic() + timeout
        services = self.services
        for service in services:
            service.engine.stop()
        if self._thread is not None:
            self._thread.join(min(timeout, _LOADER_GRACE_S))
        for service in services:
            service.engine.join(max(0.0, deadline - time.monotonic()))
            service.close()

    # What is in the pool.

    @property
    def services(self) -> list[ModelService]:
        return [model.service for model in self.models if model.service is not None]

    @property
    def is_busy(self) -> bool:
        """Whether a model is being loaded or unloaded."""
        return self._thread is not None and self._thread.is_alive()

    def find(self, name: str | None, *, takes_any: bool = False) -> PooledModel:
        """Return the model of a name, the first for None and `default_model`; refuse names that are not in the pool.

        With `takes_any`, a single model has any name: clients have names of their own for its roles.
        """
        if name in (None, DEFAULT_MODEL) or (takes_any and len(self.models) == 1):
            return self.models[0]
        for model in self.models:
            if model.name == name:
                return model
        names = ", ".join(model.name for model in self.models)
        raise ModelNotFoundError(f"the model {str(name)[:100]!r} is not served; this server has {names}", "model")

    def describe(self, model: PooledModel) -> dict[str, Any]:
        """Return a model in the shape of OpenAI's API, and what a client can know before it asks."""
        return {
            "id": model.name,
            "object": "model",
            "created": self.created,
            "owned_by": "mlx_tq",
            "loaded": model.service is not None,
            "context_length": model.positions,
            "max_model_len": model.positions,
            **({} if model.service is None else model.service.lengths()),
        }

    # Requests.

    async def acquire(self, name: str | None) -> ModelService:
        """Return a model's service, which is loaded first if needed; call `release` afterwards."""
        model = self.find(name, takes_any=True)
        if self._is_stopping:
            raise UnavailableError("the server is stopping; try again when it is back")
        service = model.service
        if service is None or model.is_unloading:
            return await self._wait_for(model)
        self.retain(service)
        return service

    def retain(self, service: ModelService) -> None:
        """Keep a loaded model that a request uses; call `release` afterwards."""
        service.users += 1
        service.last_used = time.monotonic()

    def release(self, service: ModelService) -> None:
        service.users -= 1
        service.last_used = time.monotonic()
        self._changed.set()

    async def _wait_for(self, model: PooledModel) -> ModelService:
        if sum(len(other.waiting) for other in self.models) >= self._max_waiting:
            raise QueueFullError(f"{self._max_waiting} requests wait for their model, the limit; try again later")
        request: asyncio.Future[ModelService] = asyncio.get_running_loop().create_future()
        model.waiting.append(request)
        if model.loading is None:
            model.loading = asyncio.create_task(self._load(model))
        try:
            return await request
        except asyncio.CancelledError:
            if not request.cancelled() and request.exception() is None:
                self.release(request.result())
            raise
        finally:
            if request in model.waiting:
                model.waiting.remove(request)
            self._changed.set()

    # Loading and unloading: one model at a time.

    async def _load(self, model: PooledModel) -> None:
        """Load a model and answer the requests that wait for it."""
        try:
            async with self._turn:
                # It is still loaded if it was to make room for a model that no request waits for any more.
                if model.service is None and model.has_waiting and await self._make_room(model):
                    await self._load_service(model)
        except ApiError as error:
            self._fail(model, str(error))
        except Exception as error:
            # The error may have paths of this machine, so clients do not see it.
            log.error("cannot load %s: %s", model.name, error, exc_info=not isinstance(error, MlxTqError))
            self._fail(model, f"the model {model.name!r} cannot be loaded; see the server's log")
        finally:
            model.loading = None
            for request in model.waiting:
                if not request.done() and model.service is not None:
                    self.retain(model.service)
                    request.set_result(model.service)
            if model.has_waiting:  # they came after the earlier ones were cancelled
                model.loading = asyncio.create_task(self._load(model))

    async def _load_service(self, model: PooledModel) -> None:
        log.info("loading %s", model.name)
        started = time.monotonic()
        services = [await self._run_in_thread(model.load)]  # a list, from which `_close` takes the last reference
        model.weights_nbytes = services[0].weights_nbytes
        model.nbytes = services[0].nbytes  # not what its files have, such as with --dtype
        fits = False
        try:
            fits = not self._is_stopping and await self._make_room(model)
        finally:
            if not fits:
                await self._run_in_thread(partial(_close, services))
        if fits:
            model.service = services.pop()
            model.service.engine.start(asyncio.get_running_loop())
            log.info("loaded %s in %.1f s", model.name, time.monotonic() - started)

    def _size_fault(self, model: PooledModel) -> str | None:
        """Return why a model cannot be loaded even alone."""
        if self._limit is None or model.nbytes <= self._limit:
            return None
        return (
            f"{model.name} needs {human_bytes(model.nbytes)} for its weights and KV caches; models may take "
            f"{human_bytes(self._limit)}. Raise --model-memory-limit, or lower --kv-memory-limit."
        )

    async def _make_room(self, model: PooledModel) -> bool:
        """Unload others until a model fits: idle ones first, of these the least recently used first.

        Return False if no request waits for the model any more.
        """
        if fault := self._size_fault(model):
            raise UnavailableError(fault)
        while self._limit is not None:
            loaded = {other: other.service for other in self.models if other.service is not None}
            if model.nbytes + sum(other.nbytes for other in loaded) <= self._limit:
                break
            other = min(loaded, key=lambda other: (loaded[other].users > 0, loaded[other].last_used))
            other.is_unloading = True
            try:
                while loaded[other].users and model.has_waiting:
                    self._changed.clear()
                    await self._changed.wait()
                if not model.has_waiting:
                    return False
                del loaded
                await self._unload(other)
            finally:
                other.is_unloading = False
        return True

    async def _release_idle(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds / _IDLE_CHECKS)
            for model in self.models:
                async with self._turn:
                    if _is_idle(model, seconds):
                        await self._unload(model)

    async def _unload(self, model: PooledModel) -> None:
        services = [service for service in (model.service,) if service is not None]
        model.service = None
        await self._run_in_thread(partial(_close, services))
        model.metrics.clear_gauges()
        log.info("unloaded %s, and ended its sessions", model.name)

    async def _run_in_thread(self, work: Callable[[], Result]) -> Result:
        """Run `work` in a daemon thread, which does not delay the end of the server."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Result] = loop.create_future()

        def set_result(set_outcome: Callable[[Any], None], outcome: Any) -> None:
            if not done.done():
                set_outcome(outcome)

        def run() -> None:
            outcome: tuple[Callable[[Any], None], Any]
            try:
                outcome = (done.set_result, work())
            except Exception as error:  # noqa: BLE001  raised where the result is needed
                outcome = (done.set_exception, error)
            except BaseException as error:  # noqa: BLE001  such as a panic of Rust code
                outcome = (done.set_exception, RuntimeError(repr(error)))
            finally:
                mx.clear_streams()  # the thread's own; see `Engine`
            with suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(set_result, *outcome)

        self._thread = Thread(target=run, name="model loader", daemon=True)
        self._thread.start()
        return await done

    def _fail(self, model: PooledModel, message: str) -> None:
        for request in model.waiting:
            if not request.done():
                request.set_exception(UnavailableError(message))


def _is_idle(model: PooledModel, seconds: float) -> bool:
    """Return whether a loaded model has no sessions, and was not used for some seconds."""
    service = model.service
    if service is None or service.users or len(service.sessions) or model.has_waiting:
        return False
    return time.monotonic() - service.last_used >= seconds


def _close(services: list[ModelService]) -> None:
    """End the engine of the only service, and free its memory."""
    service = services.pop()
    service.engine.join()
    service.close()
    del service
    gc.collect()
    mx.clear_cache()
