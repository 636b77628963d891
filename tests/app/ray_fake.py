"""The Ray Serve application with a fake model that obeys files; ``import_path`` of a test's Serve config."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from app.ray_serve import Replica, bind


class FakeReplica(Replica):
    """``dead`` in the folder ``state``: the device fails, of one replica; ``version``: what a load finds."""

    def __serve_build_asgi_app__(self) -> Any:
        from app import models
        from tests.app.fakes import FakeModel, FakePipeline

        state = Path(self._settings.pop("state"))

        class Pipeline(FakePipeline):
            def __call__(self, images: Tensor, /) -> Tensor:
                if (state / "dead").exists():
                    (state / "dead").unlink(missing_ok=True)
                    self.dead = True
                return super().__call__(images)

        def load(*_: Any, **__: Any) -> FakeModel:
            return FakeModel(version=(state / "version").read_text(), pipeline=Pipeline())

        models.build_model = load  # type: ignore[assignment]
        models.check_affordable = lambda *_, **__: None  # type: ignore[assignment]
        return super().__serve_build_asgi_app__()


def build(settings: Mapping[str, Any]) -> Any:
    return bind(FakeReplica, settings)
