from __future__ import annotations

import pytest
import torch
from torch import nn

from psc_core.errors import NetworkError
from psc_core.network.load import Recipe, copy_recipe, load_network, recipe_of

HERE = __name__


def tiny(num_classes: int, width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, width), nn.ReLU(), nn.Linear(width, num_classes))


def test_initialisation_follows_global_seed() -> None:
    def weight() -> torch.Tensor:
        torch.manual_seed(5)
        return load_network("torchvision:resnet18", num_classes=3).conv1.weight.detach()

    assert torch.equal(weight(), weight())


@pytest.mark.parametrize(
    ("spec", "model_args", "text"),
    [
        ("resnet18", {}, "torchvision:NAME"),
        ("torchvision:", {}, "torchvision:NAME"),
        (":net", {}, "torchvision:NAME"),
        ("torchvision:resnet19", {}, "did you mean resnet18"),
        ("torchvision:fasterrcnn_resnet50_fpn", {}, "no classification network"),
        ("torchvision:resnet18", {"stem": "tiny"}, "stem=small"),
        ("torchvision:convnext_tiny", {"stem": "small"}, "ResNets and VGGs"),
        ("torchvision:resnet18", {"depth": 3}, "rejects the model arguments"),
        ("no.such.module:net", {}, "allow-list"),
    ],
)
def test_rejects_bad_specs(spec: str, model_args: dict[str, object], text: str) -> None:
    with pytest.raises(NetworkError, match=text):
        load_network(spec, num_classes=3, model_args=model_args)


def test_factory_must_be_allowed() -> None:
    spec = f"{HERE}:tiny"
    with pytest.raises(NetworkError, match="allow-list"):
        load_network(spec, num_classes=3)
    net = load_network(spec, num_classes=3, model_args={"width": 5}, allow_factories=(spec,))
    assert net(torch.randn(2, 1, 4, 4)).shape == (2, 3)


def test_recipe_round_trip() -> None:
    net = load_network("torchvision:resnet18", num_classes=3, model_args={"stem": "small"})
    recipe = recipe_of(net)
    assert recipe == Recipe.from_json(recipe.to_json()) == Recipe("torchvision:resnet18", 3, {"stem": "small"})
    assert not recipe.is_factory
    assert Recipe("a.b:c", 3).is_factory
    other = nn.Identity()
    copy_recipe(net, other)
    assert recipe_of(other) == recipe
    with pytest.raises(NetworkError, match="built by hand"):
        recipe_of(tiny(3))
