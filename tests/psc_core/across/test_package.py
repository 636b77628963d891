import doctest
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import pytest
import torch

import psc_core


def test_package_lists_its_names() -> None:
    assert set(psc_core.__all__) == set(dir(psc_core)) == {"__version__", *psc_core._MODULES}
    assert all(getattr(psc_core, name) is not None for name in psc_core.__all__)
    with pytest.raises(AttributeError, match="it has BasePrediction, ClassificationPrediction, PRESETS, PSC"):
        psc_core.nonsense  # noqa: B018


def test_importing_the_package_is_light() -> None:
    code = (
        "import sys, psc_core; heavy = {'torch', 'torchvision', 'tensorly', 'laplace', 'fastapi', "
        "'prometheus_client', 'numpy'} & set(sys.modules); assert not heavy, heavy; "
        "import psc_core.model, psc_core.fit, psc_core.cli.job, psc_core.evaluation.evaluate; "
        "web = {'fastapi', 'starlette', 'uvicorn', 'prometheus_client', 'app'} & set(sys.modules); "
        "assert not web, web; "
        "import app.server; assert 'torch._dynamo' not in sys.modules"  # It takes as long as PyTorch itself, again.
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


MODULES = sorted(
    module.name for module in walk_packages(psc_core.__path__, "psc_core.") if not module.name.endswith("__main__")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    torch.manual_seed(0)  # One random network in 40 is warned of.
    assert doctest.testmod(import_module(name)).failed == 0
