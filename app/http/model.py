"""The service's own routes: ``/predict``, ``/model``, ``/readyz``, ``/metrics``, ``/admin``, ``/`` and ``/docs``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from importlib.resources import files
from itertools import groupby, zip_longest
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Union

import numpy as np
import orjson
from fastapi import APIRouter, FastAPI, Request, Response
from pydantic import BaseModel, Field, create_model
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, RedirectResponse
from starlette.staticfiles import StaticFiles

from app.errors import MalformedRequest, get_and_head, responses
from app.http.body import FILE_SCHEMA, IMAGES_BODY, has_disconnected, parse_query, query_parameters, read_images
from app.inference.batcher import RequestMode
from app.inference.decoder import EncodedImage
from app.models import Predicted, ServedModel, explain
from app.service import Service, service_of, service_to
from psc_core.answers import BasePolicy, Document, PredictQuery, Target
from psc_core.bundle import TRY_FOLDER
from psc_core.images import SUFFIXES
from psc_core.images.files import files_below
from psc_core.model import FittedModel
from psc_core.tasks import TASKS

if TYPE_CHECKING:
    _AnyPolicy = BasePolicy
else:
    _AnyPolicy = Union[*(task.policy_type for task in TASKS.values())]


# The parameters of all tasks, any of which may be asked.
QUERY: Final[type[PredictQuery]] = create_model(
    "PredictQuery", __base__=tuple(task.query_type for task in TASKS.values())
)
_ROUTE: Final[dict[str, Any]] = {
    "response_model": Union[*(task.response_type for task in TASKS.values())],
    "responses": responses(400, 401, 404, 408, 415, 422, 500, 504),
    "openapi_extra": {"requestBody": IMAGES_BODY, "parameters": query_parameters(QUERY)},
}
predict_router = APIRouter(tags=["predict"])


@predict_router.post("/predict", summary="Predict with the default model", **_ROUTE)
async def predict(request: Request) -> Response:
    """Return each image's label, probabilities, entropy, log density, OOD p-value, decision and prediction set.

    A regression returns a number, its deviations and an interval in place of label, probabilities, entropy and set.
    """
    return await _predict(request, None)


@predict_router.post("/models/{name}/predict", summary="Predict with a model by name", **_ROUTE)
async def predict_with(request: Request, name: str) -> Response:
    """Predict with the named model, as `/predict` does."""
    return await _predict(request, name)


async def _predict(request: Request, name: str | None) -> Response:
    service = service_to("predict", request)

    async def read(served: ServedModel, mode: RequestMode) -> Sequence[EncodedImage]:
        served.engine.check_room(mode)
        return await read_images(request, service.settings, service.parser)

    body = await predict_images(
        service,
        name,
        parse_query(QUERY, request).model_dump(exclude_none=True),
        read,
        partial(has_disconnected, request.receive),
    )
    return Response(body, media_type="application/json")


async def predict_images(
    service: Service,
    name: str | None,
    query: Mapping[str, Any],
    read: Callable[[ServedModel, RequestMode], Awaitable[Sequence[EncodedImage]]],
    disconnected: Callable[[], bool],
) -> bytes:
    """Return the answer to a request with these parameters, by name, whose images ``read`` reads."""
    registry, is_explained = service.registry, query["explain"]
    if query["map"] and not is_explained:
        raise MalformedRequest("a map is part of an explanation; ask for both with explain=true&map=true")
    mode = RequestMode.PREDICT
    if is_explained:
        mode = RequestMode.EXPLAIN_WITH_MAP if query["map"] else RequestMode.EXPLAIN
    served = registry.get(name)
    policy, options = _split_query(served, query, mode)
    images = await read(served, mode)
    before, served = served, registry.get(name)
    if served is not before:  # A reload has swapped the model while the body arrived.
        policy, options = _split_query(served, query, mode)
    monitor = query["monitor"]
    predicted = await served.predict(images, policy, disconnected=disconnected, mode=mode, monitor=monitor)
    return predict_response(served, policy, predicted, **options)


def _split_query(served: ServedModel, query: Mapping[str, Any], mode: RequestMode) -> tuple[BasePolicy, dict[str, int]]:
    """Return the policy of a request and the options of its task's answers; refuse what the model does not have."""
    task = served.model.task
    if unknown := sorted(query.keys() - task.query_type.model_fields):
        raise MalformedRequest(f"model {served.name!r} is a {task.noun}, which has no {unknown[0]}; leave it out")
    served.check_map(mode)
    changes = {name: value for name, value in query.items() if name in task.policy_type.model_fields}
    options = {name: value for name, value in query.items() if name not in {*changes, *PredictQuery.model_fields}}
    return served.policy_with(**changes), options


def predict_response(served: ServedModel, policy: BasePolicy, predicted: Predicted, **options: int) -> bytes:
    """Return the answer as JSON; its schema is the ``response_type`` of the model's task.

    orjson gets numpy's float32 values, which it prints with the fewest digits that tell them from their neighbours; as
    Python floats they would have seventeen.
    """
    model, (outputs, decisions, explanation) = served.model, predicted
    predictions = decisions.documents(outputs, model.classes, **options)
    if explanation:
        for prediction, document in zip(predictions, explain(model, predicted, policy.alpha), strict=True):
            prediction["explanation"] = document
    document = {**served.identity, "policy": policy.model_dump(), "predictions": predictions}
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


class HealthDocument(Document):
    """The answer of a process that is alive."""

    status: Literal["ok"]


class ReadyDocument(Document):
    """Whether the service is ready to predict, and why not."""

    status: Literal["ready", "not ready"]
    reasons: dict[str, str] = Field(
        description="What is missing, by model name or `service`; empty if the service is ready."
    )


class Histogram(Document):
    """A histogram: ``counts[i]`` values lie between ``edges[i]`` and ``edges[i + 1]``."""

    edges: list[float]
    counts: list[int]


class CalibrationDocument(Document):
    """The scores of the calibration images, from which p-values and thresholds come."""

    images: int
    ood_score_threshold: float = Field(description="The OOD score above which p ≤ alpha, nats.")
    ood_score: Histogram
    entropy_quantiles: list[float] | None = Field(
        description="The quantiles 0, 1, …, 100 % of the predictive entropy, nats; null for a regression."
    )


ClassNames = Annotated[
    list[str], Field(description="The names of the classes; for a regression, the bins of its target.")
]
TaskName = Annotated[str, Field(description="The task: `classification` or `regression`.")]
PredictedNumber = Annotated[
    Target | None, Field(description="The number that a regression predicts; null for a classifier.")
]


class ModelDocument(Document):
    """One served model."""

    name: str
    version: str
    layer: str
    predictions: str = Field(description="`psc` or `original`.")
    task: TaskName
    epistemic_unit: str = Field(
        description="The unit of `epistemic`; empty for the original network's predictions, which lack it."
    )
    checks: list[str] = Field(description="The checks that make up the OOD score; empty for a model without checks.")
    device: str
    backend: str
    target: PredictedNumber
    classes: ClassNames
    input: dict[str, Any] = Field(description="The preprocessing of images.")
    policy: _AnyPolicy
    notes: list[str] = Field(
        description="What is promised of accepted images, or why none is accepted; then remarks on decisions by this "
        "policy, such as `no image is called ambiguous`."
    )
    calibration: CalibrationDocument
    report: dict[str, Any] = Field(description="The measurements of the fit: collapse, metrics, provenance.")
    models: list[str] = Field(description="The names of all served models, the default first.")
    feedback: bool = Field(description="Whether the service keeps a prediction log, so that `/feedback` is served.")


class RecentDocument(Document):
    """A summary of the latest answers."""

    images: int = Field(description="The number of monitored images in the window, at most `drift_window`.")
    ood_fraction: float = Field(description="The fraction of these images with p ≤ alpha.")
    alpha: float
    drift_active: bool = Field(description="Whether an episode of drift is going on.")
    drift_alarms: int = Field(description="The number of episodes since the service began to serve the model.")
    tail_probability: float = Field(description="As `psc_drift_window_tail_probability`.")
    hour: dict[str, list[int]] = Field(description="The last hour's monitored images by decision, oldest first.")
    queued_images: int
    queue_limit: int


class ExamplesDocument(Document):
    """The images to try in a bundle."""

    files: list[str]


class ReloadedModel(Document):
    """A model after a reload."""

    name: str
    previous_version: str
    version: str


class ReloadDocument(Document):
    """The answer to a reload."""

    reloaded: list[ReloadedModel]


_BINS: Final = 40
router = APIRouter(tags=["model"], responses=responses(401))


@get_and_head(router, "/model", summary="The default model")
async def default_model(request: Request) -> ModelDocument:
    """Summarise the default model's manifest, thresholds and calibration."""
    return model_document(service_to("predict", request), None)


@get_and_head(router, "/models/{name}", summary="A model by name", responses=responses(404))
async def named_model(request: Request, name: str) -> ModelDocument:
    """Describe the named model, as `/model` does."""
    return model_document(service_to("predict", request), name)


def model_document(service: Service, name: str | None) -> ModelDocument:
    """Return the document that describes a served model, by default the default one."""
    served = service.registry.get(name)
    return describe_model(
        served.model,
        served.policy,
        name=served.name,
        backend=served.backend,
        models=service.registry.names,
        feedback=service.log is not None,
    )


def describe_model(
    model: FittedModel,
    policy: BasePolicy,
    *,
    name: str,
    backend: str,
    models: Sequence[str],
    feedback: bool = False,
) -> ModelDocument:
    """Return the document that describes a model under a policy; ``models`` are served beside it."""
    scores = model.calibration.ood_scores.cpu().numpy().astype(np.float64)
    counts, edges = np.histogram(scores, bins=_BINS)
    return ModelDocument(
        name=name,
        version=model.version,
        layer=model.layer,
        predictions=model.predictions,
        task=model.task.name,
        epistemic_unit=model.epistemic_unit,
        checks=list(model.checks),
        device=str(model.device),
        backend=backend,
        target=model.task.number(),
        classes=list(model.classes),
        input=model.preprocess.to_json(),
        policy=policy,
        notes=[model.headline(policy), *policy.notes(model.classes)],
        calibration=CalibrationDocument(
            images=len(scores),
            ood_score_threshold=model.calibration.ood_score_threshold(policy.alpha),
            ood_score=Histogram(edges=edges.tolist(), counts=counts.tolist()),
            entropy_quantiles=model.calibration.entropy_quantiles(),
        ),
        report=dict(model.report),
        models=list(models),
        feedback=feedback,
    )


MAX_FILES: Final = 12
MAX_FILE_BYTES: Final = 1 << 20  # the maximum size of an image to try, bytes; larger files are not shown
live_router = APIRouter(tags=["model"], responses=responses(401, 404))


@live_router.get("/models/{name}/live", summary="The last images of a model")
async def live(request: Request, name: str) -> RecentDocument:
    """Summarise the latest answers: the fraction of out-of-distribution images, drift, and the queue."""
    served = service_to("predict", request).registry.get(name)
    drift = served.recorder.drift
    return RecentDocument(
        images=drift.window_images,
        ood_fraction=drift.window_ood_rate,
        alpha=served.policy.alpha,
        drift_active=drift.is_active,
        drift_alarms=drift.alarms,
        tail_probability=drift.window_tail_probability,
        hour=served.recorder.last_hour(),
        queued_images=served.engine.pending,
        queue_limit=served.recorder.queue_limit,
    )


@live_router.get(
    "/models/{name}/examples",
    summary="Images to try",
    description=f"List the image files in the folder `{TRY_FOLDER}` of the bundle, at most {MAX_FILES} of at most "
    f"{MAX_FILE_BYTES >> 20} MiB.",
)
async def examples(request: Request, name: str) -> ExamplesDocument:
    """List a model's images to try."""
    service = service_to("predict", request)
    service.registry.get(name)
    return ExamplesDocument(files=sorted(example_files(service, name)))


@live_router.get(
    "/models/{name}/examples/{file}",
    summary="An image to try",
    response_class=FileResponse,
    responses={200: {"content": {"image/*": {"schema": FILE_SCHEMA}}}},
)
async def example(request: Request, name: str, file: str) -> FileResponse:
    """Return one of these images."""
    service = service_to("predict", request)
    service.registry.get(name)
    found = example_files(service, name).get(file)
    if found is None:
        raise HTTPException(404, f"model {name!r} has no such image to try")
    return FileResponse(found, headers={"X-Content-Type-Options": "nosniff"})


def example_files(service: Service, name: str) -> dict[str, Path]:
    """Return a model's images to try by file name; only regular files of the bundle's folder of examples."""
    bundle = dict(service.settings.named_bundles).get(name)
    return {} if bundle is None else examples_in(bundle / TRY_FOLDER, bundle)


def examples_in(folder: Path, home: Path, suffixes: Collection[str] = SUFFIXES) -> dict[str, Path]:
    """Return images to try by file name, after its subfolder's; only files that lie in ``folder``, wherever links lead.

    The folder itself, which may be a link, lies in ``home``.
    """
    root = folder.resolve()
    if not (folder.is_dir() and root.is_relative_to(home.resolve())):
        return {}
    files = [
        path
        for path in map(Path, sorted(files_below(folder, linked=False)))
        if path.suffix.lower() in suffixes
        and path.is_file()
        and path.resolve().is_relative_to(root)
        and path.stat().st_size <= MAX_FILE_BYTES
    ]
    folder_of = attrgetter("parent")
    of_folder = [list(each) for _, each in groupby(sorted(files, key=folder_of), key=folder_of)]
    in_turns = [path for each in zip_longest(*of_folder) for path in each if path is not None]  # of all
    return {"-".join(path.relative_to(folder).parts): path for path in in_turns[:MAX_FILES]}


class _ReloadQuery(BaseModel):
    model: str | None = Field(default=None, description="The model to reload; by default all.")


operations_router = APIRouter()


@get_and_head(operations_router, "/healthz", summary="Liveness", tags=["health"])
async def healthz() -> HealthDocument:
    """Answer 200 while the process is alive."""
    return HealthDocument(status="ok")


@get_and_head(
    operations_router,
    "/readyz",
    summary="Readiness",
    tags=["health"],
    responses={503: {"model": ReadyDocument, "description": "Loading, warming up, draining or failed."}},
)
async def readyz(request: Request, response: Response) -> ReadyDocument:
    """Answer 200 if every model is loaded, checked on its device and warmed up; else 503 with the reasons.

    Models that were unloaded do not count, unless all were.
    """
    reasons = service_of(request).reasons()
    if reasons:
        response.status_code = 503
    return ReadyDocument(status="not ready" if reasons else "ready", reasons=reasons)


@get_and_head(
    operations_router,
    "/metrics",
    summary="Metrics",
    tags=["metrics"],
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(request: Request) -> Response:
    """Return the metrics in the Prometheus text format."""
    service = service_of(request)
    service.refresh_metrics()
    service.refresh_gpu_metrics()
    body, content_type = service.metrics.exposition()
    return Response(body, headers={"content-type": content_type})


@operations_router.post(
    "/admin/reload",
    summary="Reload bundles",
    tags=["admin"],
    responses=responses(400, 401, 403, 404, 409, 415, 422, 500),
    openapi_extra={"parameters": query_parameters(_ReloadQuery)},
)
async def reload(request: Request) -> ReloadDocument:
    """Load and warm up the new model beside the old one, then swap them; a bad bundle changes nothing."""
    service = service_to("admin", request)
    changes = await service.registry.reload(parse_query(_ReloadQuery, request).model)
    return ReloadDocument(
        reloaded=[ReloadedModel(name=name, previous_version=before, version=now) for name, before, now in changes]
    )


# The headers of every file: nothing inline, nothing from elsewhere, no framing, always revalidate.
SECURITY_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
PAGE: Final = Path(str(files("app.http") / "page"))
_SWAGGER: Final = Path(str(files("fastapi_offline") / "static"))


class PageFiles(StaticFiles):
    """Static files that are sent with :data:`SECURITY_HEADERS`."""

    def file_response(self, *arguments: Any, **options: Any) -> Response:
        response = super().file_response(*arguments, **options)
        response.headers.update(SECURITY_HEADERS)
        return response


def add_to(app: FastAPI, *, index: bool) -> None:
    """Serve Swagger UI, from the package fastapi-offline, at ``/docs`` and, with ``index``, the page at ``/``.

    The files have routes of their own, because a mount does not find them behind a proxy that strips a prefix.
    """
    page_files, swagger = PageFiles(directory=PAGE), PageFiles(directory=_SWAGGER)

    @app.get("/page/{file}", include_in_schema=False)
    async def page_file(request: Request, file: str) -> Response:
        return await page_files.get_response(file, request.scope)

    @app.get("/docs-assets/{file}", include_in_schema=False)
    async def swagger_file(request: Request, file: str) -> Response:
        return await swagger.get_response(file, request.scope)

    @get_and_head(app, "/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        return await page_files.get_response("docs.html", request.scope)

    @app.get("/redoc", include_in_schema=False)
    async def redoc() -> Response:
        return RedirectResponse("docs")  # ReDoc needs inline styles, which the headers forbid.

    if index:

        @get_and_head(app, "/", include_in_schema=False)
        async def page(request: Request) -> Response:
            return await page_files.get_response("index.html", request.scope)
