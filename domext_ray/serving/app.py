"""The endpoints, with FastAPI: JSON comes in, the service answers, OpenAPI describes it at /openapi.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from domext_ray.serving.endpoints import Endpoint, RefusedError, TextRequest
from domext_ray.serving.guard import USED_ADAPTER, RequestGuard, show_error
from domext_ray.serving.service import Service

PAGE = Path(__file__).parent.parent / "assets" / "serve.html"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


_NO_JSON = "the body is no JSON object; send one with the header Content-Type: application/json."


class Predictions(BaseModel):
    """An answer per text, in order; each names its adapter."""

    predictions: list[dict[str, Any]]


class Adapters(BaseModel):
    """What is served."""

    adapters: list[dict[str, Any]]
    base: dict[str, Any] | None


def make_app(service: Service, token_sha256: str, lifespan: Any = None) -> RequestGuard:
    """Make the application of a service; `lifespan` is there as long as it is, as FastAPI takes it."""
    api = FastAPI(title="domext_ray", version="1", docs_url=None, redoc_url=None, lifespan=lifespan)
    api.add_exception_handler(HTTPException, _refuse)
    api.add_exception_handler(RequestValidationError, _refuse_form)
    api.add_exception_handler(Exception, _fail)
    for endpoint in service.endpoints:
        name = endpoint.name.replace("-", "_")
        add = api.post(
            f"/v1/{endpoint.name}", response_model=Predictions, name=name, description=endpoint.__doc__ or ""
        )
        add(_make_route(service, endpoint))
    _add_watching(api, service)
    paths = [getattr(route, "path", "") for route in api.routes]
    return RequestGuard(api, service.config.limit, token_sha256, service.metrics, paths)


def _make_route(service: Service, endpoint: Endpoint[Any]) -> Any:
    async def predict(asked: TextRequest, request: Request) -> Response:
        answers, request.scope.setdefault("state", {})[USED_ADAPTER] = await service.predict(endpoint, asked)
        return JSONResponse({"predictions": answers})

    predict.__annotations__["asked"] = endpoint.request
    return predict


def _add_watching(api: FastAPI, service: Service) -> None:
    page = PAGE.read_text(encoding="utf-8")

    @api.get("/v1/adapters", response_model=Adapters)
    async def list_adapters() -> Response:
        """What is served."""
        await service.look()
        catalogue, found = service.catalogue, service.catalogue.base
        base = found and {"name": found.name, "architecture": found.architecture, "words": catalogue.has_words}
        return JSONResponse({"adapters": [adapter.describe() for adapter in catalogue.list()], "base": base})

    @api.get("/", include_in_schema=False)
    async def show_page() -> Response:
        return HTMLResponse(page, headers=_HEADERS)

    @api.get("/healthz")
    async def is_alive() -> Response:
        """Whether this process answers."""
        return JSONResponse({"status": "alive"})

    @api.get("/readyz")
    async def is_ready() -> Response:
        """Whether a request would be answered now."""
        if not service.backend.is_ready:
            raise RefusedError(503, "no replica is ready yet.", 1)
        return JSONResponse({"status": "ready"})

    @api.get("/metrics")
    async def read_metrics() -> Response:
        """Counters for Prometheus."""
        return Response(service.metrics.write(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return show_error(error)


def _fail(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "something went wrong here; the log of the server says what."}, 500)


def _refuse_form(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part != "body")
    sentence = (
        f"{place} is not as it must be: {first['msg']}." if place and first["type"] != "json_invalid" else _NO_JSON
    )
    return JSONResponse({"error": sentence}, status_code=422)
