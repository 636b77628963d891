"""What a person wants to know of a fitted regression: the last lines of its fit, and its model card."""

from __future__ import annotations

from pathlib import Path

from psc_core.bundle.io import write_file
from psc_core.bundle.manifest import Manifest
from psc_core.policy import ValuePolicy
from psc_core.report.page import CARD, serve_command


def to_text(manifest: Manifest) -> str:
    """The last lines of a fit on the terminal.

    Raises:
        TypeError: The manifest is of a classifier.
    """
    return "\n".join(_lines(manifest))


def write_card(folder: Path, manifest: Manifest) -> None:
    """Write the model card into the bundle."""
    text = [f"# {manifest.name}", "", f"A regression of {manifest.target} with uncertainty, by PSC.", ""]
    text += [f"* {line}" for line in _lines(manifest)]
    text += ["", f"In this folder: `{serve_command(Path(), manifest)}`", ""]
    write_file(folder / CARD, "\n".join(text).encode())


def _lines(manifest: Manifest) -> list[str]:
    policy, metrics, target = manifest.policy, manifest.metrics, manifest.target
    if target is None or not isinstance(policy, ValuePolicy):
        raise TypeError(f"{manifest.name} is a classifier")
    unit = f" {target.unit}".rstrip()
    width = (
        "no interval is too wide" if policy.max_width is None else f"uncertain: wider than {policy.max_width:g}{unit}"
    )
    return [
        f"RMSE {metrics['rmse']:.4g}{unit}, R² {metrics['r2']:.4f}, NLL {metrics['nll_nats']:.4f} nats, CRPS "
        f"{metrics['crps']:.4g}{unit}, on {metrics['validation_images']} validation images that nothing was chosen on",
        f"intervals hold the true number for at least {policy.coverage:.1%} of images like the validation images",
        f"out of distribution: at most {policy.alpha:.1%} of images like the validation images",
        width,
    ]
