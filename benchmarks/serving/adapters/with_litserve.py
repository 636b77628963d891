"""LitServe: one API of batches, the image as the raw body."""

from typing import Annotated, Any

import litserve as ls
from fastapi import Body
from starlette.responses import Response

from benchmarks.serving.adapters.model import Model
from benchmarks.serving.adapters.settings import MAX_BATCH, option, port


class Classify(ls.LitAPI):
    """The API: bytes in, answer out."""

    def setup(self, device: str) -> None:
        self._model = Model()

    def decode_request(self, request: Annotated[bytes, Body(media_type="image/*")]) -> Any:
        return self._model.decode(request)

    def batch(self, inputs: Any) -> Any:
        return inputs

    def predict(self, images: Any) -> Any:
        return self._model.predict(images)

    def unbatch(self, output: Any) -> Any:
        return output

    def encode_response(self, output: Any) -> Response:
        return Response(self._model.dump(output), media_type="application/json")


def main() -> None:
    api = Classify(max_batch_size=MAX_BATCH, batch_timeout=option("WAIT_MS", 2) / 1000, api_path="/predict")
    server = ls.LitServer(api, accelerator="cpu", workers_per_device=option("COPIES", 1), fast_queue=True, timeout=30)
    server.run(
        host="127.0.0.1",
        port=port(),
        num_api_servers=option("FRONTS", 1),
        log_level="error",
        generate_client_file=False,
        access_log=False,
    )


if __name__ == "__main__":
    main()
