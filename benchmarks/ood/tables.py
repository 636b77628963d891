"""The report of the out-of-distribution comparison."""

from __future__ import annotations

from benchmarks import runs
from benchmarks.ood import choice
from benchmarks.ood.variants import DEFAULT, DENSITY, PAPER, PENULTIMATE, WITH_ENTROPY
from benchmarks.runs import Json

SOFTMAX = "max-softmax (psc_core)"

SHOWN_VARIANTS = 3
"""Number of PSC variants, best on validation, in a setting's table besides the default."""


def fragment(record: Json) -> str:
    """Summary over settings, findings, and a table for each setting."""
    settings: dict[str, Json] = record["result"]["settings"]
    parts = [
        "## Out-of-distribution detection: PSC against its peers on the same checkpoints",
        summary(settings),
        "\n".join(f"- {sentence}" for sentence in findings(settings)),
    ]
    for name, setting in settings.items():
        parts += [f"### {name}", setting_table(settings, name), _about(setting)]
    parts.append(runs.provenance(record))
    return "\n\n".join(parts) + "\n"


def summary(settings: dict[str, Json]) -> str:
    """Test AUROC, one row for each setting and OOD set."""
    header = [
        "setting → out of distribution",
        "PSC (default, gates)",
        "PSC (density)",
        "PSC (`density+entropy`)",
        "PSC (the paper's)",
        "PSC (selected on other settings)",
        "penultimate GDA",
        "penultimate GDA, L2",
        "max-softmax",
        "best of pytorch-ood",
    ]
    lines = []
    for name, setting in settings.items():
        selected = choice.selected_elsewhere(settings, "psc", name)
        columns = (DEFAULT, DENSITY, WITH_ENTROPY, PAPER, selected, *PENULTIMATE, SOFTMAX)
        for ood in setting["detectors"][DENSITY]["test"]:
            cells = [_auroc(setting, detector, ood) for detector in columns]
            best = _best_peer(setting, ood)
            cells.append("not run" if best is None else f"{_auroc(setting, best, ood)} ({best})")
            lines.append([f"{name} → {ood}", *cells])
    return runs.markdown_table(header, lines)


def findings(settings: dict[str, Json]) -> list[str]:
    """Where PSC is behind penultimate Gaussians or max-softmax, and the best variant over all validation pairs."""
    sentences = []
    for name, setting in settings.items():
        ours = DEFAULT if DEFAULT in setting["detectors"] else DENSITY
        for ood, own in setting["detectors"][ours]["test"].items():
            behind = [
                f"{detector} ({_auroc(setting, detector, ood)})"
                for detector in (*PENULTIMATE, SOFTMAX)
                if setting["detectors"][detector]["test"][ood]["auroc"] > own["auroc"]
            ]
            if behind:
                with_entropy = _auroc(setting, WITH_ENTROPY, ood)
                sentences.append(
                    f"{name} → {ood}: `{ours}` ({own['auroc']:.4f}; with the entropy {with_entropy}) is behind "
                    f"{' and '.join(behind)}."
                )
    ranked = choice.ranking(settings, "psc")
    means = dict(ranked)
    best, value = ranked[0]
    sentences.append(
        f"Over the validation pairs of {len(settings)} setting(s) the best PSC variant is `{best}` (mean "
        f"AUROC {value:.4f}; the density alone `{DENSITY}`: {means[DENSITY]:.4f}; the paper's `{PAPER}`: "
        f"{means[PAPER]:.4f})."
    )
    if len(sentences) == 1:
        sentences.insert(0, "PSC is at or above penultimate Gaussians and max-softmax in every setting.")
    return sentences


def setting_table(settings: dict[str, Json], name: str) -> str:
    """The default and the best PSC variants, their penultimate counterparts and the peers, by mean test AUROC."""
    setting = settings[name]
    detectors = setting["detectors"]
    by_validation = sorted(
        (key for key, found in detectors.items() if found["family"] == "psc"),
        key=lambda key: -(choice.mean_auroc(setting, key, "validation") or 0.0),
    )
    shown = {DENSITY, PAPER, *by_validation[:SHOWN_VARIANTS], *PENULTIMATE} | ({DEFAULT, WITH_ENTROPY} & set(detectors))
    shown |= {key for key, found in detectors.items() if found["family"] in ("pytorch-ood", "psc_core baseline")}
    outside = list(detectors[DENSITY]["test"])
    header = [
        "detector",
        *(f"{what} {ood}" for ood in outside for what in ("AUROC", "FPR95")),
        "AUROC validation",
        "ms/image",
        "MiB",
    ]
    lines = []
    for key in sorted(shown, key=lambda key: (-(choice.mean_auroc(setting, key, "test") or 0.0), key)):
        found = detectors[key]
        cells = [f"{found['test'][ood][what]:.4f}" for ood in outside for what in ("auroc", "fpr95")]
        title = f"**{key} (default)**" if key == DEFAULT else f"**{key}**" if found["family"] == "psc" else key
        lines.append(
            [
                title,
                *cells,
                f"{choice.mean_auroc(setting, key, 'validation'):.4f}",
                f"{found['ms_per_image']:.3f}",
                f"{found['memory_bytes'] / 2**20:.1f}",
            ]
        )
    return runs.markdown_table(header, lines)


def _about(setting: Json) -> str:
    layers = "; ".join(
        f"{granularity}: {'+'.join(found['layers'])} (NC1 {found['nc1'][0]:.3f}, NC4 {found['nc4'][0]:.3f}, "
        f"{found['size'][0]} × {found['size'][1]})"
        for granularity, found in setting["layers"].items()
    )
    end = setting["penultimate"]
    failed = "".join(f" {name}: {reason}." for name, reason in setting["failed"].items())
    images = f"at most {setting['images']}" if setting["images"] else "all"
    fitted = setting["fit_images"] or "all"
    return (
        f"{setting['trained']}; fitted on {fitted} training images, {images} images scored a data set. "
        f"Candidates: {layers}; penultimate NC1 {end['nc1'][0]:.3f}, NC4 {end['nc4'][0]:.3f}. "
        f"pytorch-ood {setting['peers'] or 'not installed'}.{failed}"
    )


def _auroc(setting: Json, detector: str | None, ood: str) -> str:
    found = setting["detectors"].get(detector) if detector else None
    return "—" if found is None else f"{found['test'][ood]['auroc']:.4f}"


def _best_peer(setting: Json, ood: str) -> str | None:
    peers = {
        key: found["test"][ood]["auroc"]
        for key, found in setting["detectors"].items()
        if found["family"] == "pytorch-ood"
    }
    return max(peers, key=lambda key: peers[key]) if peers else None
