"""Ray Serve: one deployment whose replicas batch; the image as the raw body."""

from __future__ import annotations

import signal
from typing import Any

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from benchmarks.serving.adapters.model import Model
from benchmarks.serving.adapters.settings import MAX_BATCH, option, port


@serve.deployment(num_replicas=option("COPIES", 1), max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0.5})
class Classify:
    """The deployment: bytes in, answer out."""

    def __init__(self) -> None:
        self._model = Model()

    @serve.batch(max_batch_size=MAX_BATCH, batch_wait_timeout_s=option("WAIT_MS", 2) / 1000)
    async def predict(self, images: list[Any]) -> list[dict[str, Any]]:
        return self._model.predict(images)

    async def __call__(self, request: Request) -> Response:
        answer = await self.predict(self._model.decode(await request.body()))
        return Response(self._model.dump(answer), media_type="application/json")


def main() -> None:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": "127.0.0.1", "port": port()},
        logging_config={"log_level": "ERROR", "enable_access_log": False},
    )
    application = Classify.bind()  # type: ignore[attr-defined]
    serve.run(application, route_prefix="/predict")
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
