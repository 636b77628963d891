"""A network family: ``tiny:NAME``, where :mod:`tests.tiny` plays the library."""

EDITS = {
    "psc_core/network/load.py": [
        (
            "BUILDERS: ",
            """def from_tiny(name: str, num_classes: int, model_args: Mapping[str, Any]) -> nn.Module:
    from tests import tiny

    if name != "network":
        raise NetworkError(f"tiny has no network {name!r}; {hint(name, ['network'])}")
    try:
        net: nn.Module = tiny.network(num_classes, **model_args)
    except TypeError as error:
        raise NetworkError(f"tiny:{name} rejects the model arguments {dict(model_args)}: {error}") from error
    return net


BUILDERS: """,
        ),
        ('    "timm": from_timm,\n', '    "timm": from_timm,\n    "tiny": from_tiny,\n'),
    ],
    "psc_core/network/__init__.py": [('("torchvision", "timm")', '("torchvision", "timm", "tiny")')],
    "tests/psc_core/network/test_load.py": [
        (
            "def test_timm_networks_load(",
            """def test_tiny_networks_load() -> None:
    assert load_network("tiny:network", num_classes=3)[-1].out_features == 3
    with pytest.raises(NetworkError, match="did you mean network"):
        load_network("tiny:netwerk", num_classes=3)
    with pytest.raises(NetworkError, match="rejects the model arguments"):
        load_network("tiny:network", num_classes=3, model_args={"depth": 3})


def test_timm_networks_load(""",
        )
    ],
    "docs/bundle-format.md": [
        ("`torchvision:NAME`, `timm:NAME` or", "`torchvision:NAME`, `timm:NAME`, `tiny:NAME` or")
    ],
}

PROGRAM = """
import json, sys
from pathlib import Path
import pytest
tests = ["tests/psc_core/network/test_load.py", "-k", "tiny_networks or libraries"]
assert pytest.main(["-q", "--noconftest", "-p", "no:cacheprovider", *tests]) == 0

from app.cli import check_factory
from psc_core import load_model
from psc_core.cli.fit import main

for task, arguments in json.loads(sys.argv[1]).items():
    arguments[arguments.index("--model") + 1] = "tiny:network"
    assert main([*arguments, "--no-report", "--out", task]) == 0
    assert load_model(task, device="cpu").task.name == task
    check_factory(task, Path(task) / "manifest.json", allowed=())  # psc-serve asks for no permission
"""
