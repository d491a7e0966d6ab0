"""The gateway as an ASGI application: its routes, and errors in one shape."""

import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from client.gateway.delivery import SpeechResponse
from client.gateway.errors import ApiError
from client.gateway.guard import Guard, error_response, read_body
from client.gateway.metrics import CONTENT_TYPE, Metrics
from client.gateway.options import Options
from client.gateway.service import Service
from client.gateway.speech_request import names_this_model, parse_body, parse_query

STATIC: Final = Path(__file__).parent / "static"
MODEL_ID: Final = "MiniMaxAI/MiniMax-Music3"
# Pages of other sites see no header but these.
EXPOSED_HEADERS: Final = (
    "X-Request-Id",
    "X-Music3-Seed",
    "X-Music3-Prompt-Tokens",
    "X-Music3-Frame-Cap",
    "X-Music3-Warnings",
    "X-Music3-Frames",
    "X-Music3-Finish-Reason",
    "Retry-After",
)
_STARTED_S: Final = int(time.time())


def make_app(options: Options) -> FastAPI:
    """An application for one server; its connection lives as long as the application runs."""
    metrics = Metrics()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.service = Service(options, metrics)
        yield
        await app.state.service.client.close()

    # No /docs: that page loads its scripts from another host.
    app = FastAPI(title="Music 3 gateway", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, options=options, metrics=metrics)
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
            expose_headers=EXPOSED_HEADERS,
        )
    _add_error_handlers(app)
    _add_routes(app, options, metrics)
    app.mount("/", StaticFiles(directory=STATIC, html=True))
    return app


def _add_routes(app: FastAPI, options: Options, metrics: Metrics) -> None:
    def speech_response(body: object) -> SpeechResponse:
        wanted = parse_body(body, aliases=options.model_aliases)
        return SpeechResponse(app.state.service, wanted, uuid.uuid4().hex)

    @app.post("/v1/audio/speech")
    async def post_speech(request: Request) -> Response:
        raw = await read_body(request, options)
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            raise ApiError(400, "the body is not JSON in UTF-8", code="invalid_json") from None
        return speech_response(body)

    @app.get("/v1/audio/speech")
    async def get_speech(request: Request) -> Response:
        return speech_response(parse_query(request.query_params))

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        names = (MODEL_ID, options.model, *options.model_aliases)
        return JSONResponse({"object": "list", "data": [_model(name) for name in dict.fromkeys(names)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> JSONResponse:
        if name != options.model and not names_this_model(name, options.model_aliases):
            raise ApiError(404, f"{name[:200]!r} is not served here", param="model", code="model_not_found")
        return JSONResponse(_model(name))

    @app.get("/health")
    async def health() -> JSONResponse:
        service: Service = app.state.service
        ready = await service.is_ready()
        answer = {"status": "ok" if ready else "unavailable", "live_songs": service.live_songs}
        return JSONResponse(answer, status_code=200 if ready else 503)

    @app.get("/metrics")
    async def metrics_page() -> Response:
        return Response(metrics.page(), headers={"Content-Type": CONTENT_TYPE})


def _model(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": _STARTED_S, "owned_by": "MiniMaxAI"}


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        where = f"{request.method} {request.url.path[:200]}"
        return error_response(ApiError(error.status_code, f"{where}: {error.detail}"))

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:
        return error_response(ApiError(500, "the gateway failed; its log says why"))
