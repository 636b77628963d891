"""A second reader of bundles, written from ``docs/bundle-format.md``: with NumPy, json and hashlib alone.

It reads everything behind the network, in float64: features of the chosen layer(s) in, outputs and decisions out.
"""

import hashlib
import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1",
           "BOOL": "?"}  # fmt: skip


class Rejected(Exception):
    """The directory is no bundle of version 7."""


@dataclass(frozen=True)
class Answer:
    """Outputs and decisions of B images."""

    z: Array
    log_density: Array
    p_value: Array
    check_p_values: Array
    is_ood: Array
    probabilities: Array
    entropy: Array
    epistemic: Array
    prediction_set: Array
    decision: list[str]


@dataclass(frozen=True)
class ValueAnswer:
    """Outputs and decisions of B images of a regression."""

    log_density: Array
    p_value: Array
    mean: Array
    aleatoric: Array
    epistemic: Array
    interval: Array
    decision: list[str]


def parse_safetensors(blob: bytes) -> dict[str, Array]:
    """Eight bytes of header length, a JSON header, the data."""
    (length,) = struct.unpack("<Q", blob[:8])
    header, data = json.loads(blob[8 : 8 + length]), blob[8 + length :]
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        tensors[name] = np.frombuffer(data[start:end], dtype=_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def version_of(manifest: dict[str, Any]) -> str:
    """The digest of everything but ``version``."""
    others = {key: value for key, value in manifest.items() if key != "version"}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()[:12]


class SecondReader:
    """One bundle."""

    def __init__(self, folder: Path) -> None:
        self.manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text("utf-8"))
        if self.manifest["schema_version"] != 7 or self.manifest["version"] != version_of(self.manifest):
            raise Rejected("schema or version")
        if self.manifest["task"] not in ("classification", "regression"):
            raise Rejected("task")
        self.parts: dict[str, dict[str, Array]] = {}
        for name, entry in self.manifest["files"].items():
            blob = (folder / name).read_bytes()
            if len(blob) != entry["bytes"] or hashlib.sha256(blob).hexdigest() != entry["sha256"]:
                raise Rejected(name)
            self.parts[name.removesuffix(".safetensors")] = parse_safetensors(blob)

    def tensors(self, part: str) -> dict[str, Array]:
        """One part in float64."""
        return {name: tensor.astype(np.float64) for name, tensor in self.parts[part].items()}

    # -- pixels ---------------------------------------------------------------------------------------------------

    def standardise(self, pixels: Array) -> Array:
        """uint8 (B, C, H, W) to the network's input."""
        section = self.manifest["preprocess"]
        if section.get("resizer", "pillow") not in ("torch", "pillow"):
            raise Rejected("preprocess.resizer")
        if section.get("background", "black") not in ("black", "white", "none"):
            raise Rejected("preprocess.background")
        if section.get("crop_rounding", "down") not in ("down", "even"):
            raise Rejected("preprocess.crop_rounding")
        std, mean = np.array(section["std"])[:, None, None], np.array(section["mean"])[:, None, None]
        return pixels * (1 / (255 * std)) - mean / std

    # -- features to z --------------------------------------------------------------------------------------------

    def project(self, features: list[Array]) -> Array:
        """Features (B, channels, positions) of each layer to z."""
        t = self.tensors("projection")
        if all(f.shape[2] == 1 for f in features):
            features = [f.transpose(0, 2, 1) for f in features]
        kept = self.manifest["projection"]["positions"]
        x = np.concatenate([_pool(f, m) for f, m in zip(features, kept, strict=True)], axis=2)
        block = t["channel_factor"].T @ ((x - t["mean"]) * t["inverse_std"]) @ t["spatial_factor"]
        return (block.reshape(len(block), -1) - t["z_mean"]) * t["z_inverse_std"]

    # -- z to log p -----------------------------------------------------------------------------------------------

    def log_density(self, z: Array, features: list[Array]) -> Array:
        """log p(z), or of the features averaged over positions; ``features`` are those of all the bundle's layers."""
        density = self.tensors("density"), self.manifest["density"]["kind"]
        return self.gaussians(*density, self._density_input(z, features))

    def _density_input(self, z: Array, features: list[Array]) -> Array:
        if self.manifest["density"]["kind"] != "pooled++":
            return z
        read = dict(zip(self.manifest["backbone"]["layers"], features, strict=True))
        names = [*self.manifest["layers"], *self.manifest["density"].get("layers", [])]
        return np.concatenate([read[name].mean(2) for name in names], axis=1)

    def gaussians(self, t: dict[str, Array], kind: str, z: Array) -> Array:
        """log p of what a density reads."""
        w = _coordinates(t, kind, z)
        if kind in ("gda", "gda++", "pooled++"):
            difference = np.einsum("kpq,bkq->bkp", t["whiteners"], w[:, None] - t["centres"])
        elif kind in ("tied", "mahalanobis++", "rmd"):
            difference = w[:, None] - t["centres"]
        else:
            raise Rejected(kind)
        joint = t["constants"] - (difference**2).sum(2) / 2
        if kind in ("rmd", "pooled++"):
            squares = np.minimum(((w @ t["background"]) ** 2).sum(1), t.get("background_limit", np.inf))
            background = t["background_constant"] - squares / 2
            joint -= {"rmd": 1, "pooled++": 0.5}[kind] * background[:, None]
        return _log_sum_exp(joint)

    # -- z to probabilities ---------------------------------------------------------------------------------------

    def classify(self, read: Array, logits: Array | None) -> tuple[Array, Array]:
        """Probabilities and epistemic uncertainty."""
        t = self.tensors("head")
        if self.manifest["head"]["kind"] == "own":
            assert logits is not None
            own = logits / t["temperature"]
            return _softmax(own), np.zeros(len(own))
        phi = (read - t["center"]) * t["inverse_scale"]
        return {"laplace": _laplace, "sngp": _sngp, "duq": _duq}[self.manifest["head"]["kind"]](t, phi)

    # -- checks ----------------------------------------------------------------------------------------------------

    def checks(
        self, early: Array | None, log_density: Array, probabilities: Array, density_input: Array
    ) -> tuple[Array, Array]:
        """OOD score, and p-value of each check, (B, G)."""
        section, t = self.manifest["checks"], self.tensors("checks")
        values = {"content": -log_density, "confidence": (np.sort(probabilities)[:, -10:-1] ** 0.2).sum(1)}
        below = {"reviewed": section.get("reviewed", {}).get("counts_below")}
        if "reviewed" in section:
            w = _coordinates(self.tensors("density"), self.manifest["density"]["kind"], density_input)
            values["reviewed"] = (w @ t["reviewed.directions"] - t["reviewed.offsets"]).max(1)
        if section["texture"]:
            assert early is not None
            own = {name.removeprefix("texture."): tensor for name, tensor in t.items() if name.startswith("texture.")}
            values["texture"] = -self.gaussians(own, section["texture"]["density"]["kind"], early.mean(2))
            below["texture"] = section["texture"]["counts_below"]
        score, p_values = np.zeros(len(log_density)), []
        for g, name in enumerate(section["names"]):
            r, a = values[name], t["ascending"][g]
            known, at = np.unique(a[::-1], return_index=True)  # of equal ones the last
            log_p = np.log((at + 1) / (len(a) + 1))
            inside = np.interp(r, known, log_p, left=math.log(len(a) / (len(a) + 1)))
            log_p = np.where(r < a[-1], inside, -math.log(len(a) + 1) - (r - a[-1]) / t["scales"][g])
            score -= np.minimum(0, log_p - math.log(below.get(name, 1)))
            p_values.append((1 + (t["calibration"][g] >= r[:, None]).sum(1)) / (t["calibration"].shape[1] + 1))
        return score, np.stack(p_values, axis=1)

    # -- map ------------------------------------------------------------------------------------------------------

    def map_distances(self, features: Array) -> Array:
        """Distances (B, rows, columns) from the features (B, C, positions) of the map's layer."""
        section, t = self.manifest["map"], self.tensors("map")
        if section["density"]["kind"] not in ("gaussian", "nearest"):
            raise Rejected("map.density.kind")
        rows, columns, first = (section["grid"][name] for name in ("rows", "columns", "first"))
        x = np.asarray(features, np.float64)[:, :, first:].transpose(0, 2, 1)
        if section["density"]["kind"] == "gaussian":
            q = (((x - t["mean"]) @ t["whitener"]) ** 2).sum(2)
        else:
            q = np.stack([np.linalg.norm(image[:, None] - t["stored"], axis=2).min(1) for image in x])
        q = q.reshape(-1, rows, columns)
        padded = np.pad(q, ((0, 0), (1, 1), (1, 1)), constant_values=np.nan)
        shifted = [padded[:, j : j + rows, i : i + columns] for j in range(3) for i in range(3)]
        return np.nanmean(shifted, axis=0)

    def grey_levels(self, distances: Array) -> Array:
        """Grey levels of a map."""
        return np.searchsorted(self.tensors("map")["thresholds"], distances, side="right")

    # -- stored_images -----------------------------------------------------------------------------------------------

    def thumbnail_distances(self, z: Array, features: list[Array]) -> Array:
        """Distance (B, N) of each image from each kept training image."""
        t, own = self.tensors("density"), self.tensors("stored_images")
        kind = self.manifest["density"]["kind"]
        return np.linalg.norm(
            _coordinates(t, kind, self._density_input(z, features))[:, None] - own["embedding"], axis=2
        )

    # -- decisions ------------------------------------------------------------------------------------------------

    def p_values(self, ood_score: Array) -> Array:
        """p-value of each image."""
        scores = self.tensors("calibration")["ood_scores"]
        return (1 + (scores[None] >= ood_score[:, None]).sum(1)) / (len(scores) + 1)

    def set_threshold(self) -> float:
        """Smallest probability of a class in a prediction set."""
        given = self.tensors("calibration")["label_probabilities"]
        rank = math.ceil((len(given) + 1) * self.manifest["policy"]["coverage"] - 1e-9)
        return float(given[len(given) - rank])

    def answer_values(self, features: list[Array], output: Array | None = None) -> ValueAnswer:
        """The same for a regression; ``output`` (B, 1) is the network's own, for the original network's predictions."""
        policy, layers, names = (
            self.manifest["policy"],
            len(self.manifest["layers"]),
            self.manifest["backbone"]["layers"],
        )
        features = [np.asarray(f, np.float64) for f in features]
        early, read = features[-1], dict(zip(names, features, strict=True))
        z, t, calibration = self.project(features[:layers]), self.tensors("head"), self.tensors("calibration")
        log_density = self.log_density(z, features)
        ood_score = -log_density
        if "checks" in self.manifest:
            ood_score, _ = self.checks(early, log_density, np.zeros((len(z), 0)), self._density_input(z, features))
        others = [read[name].mean(2) for name in self.manifest["head"].get("layers", [])]
        phi = (np.concatenate([z, *others], axis=1) - t["center"]) * t["inverse_scale"]
        mean, aleatoric, epistemic = {"blr": _blr, "dve": _dve}[self.manifest["head"]["kind"]](t, phi)
        mean = mean if output is None else output[:, 0]
        n = len(calibration["ood_scores"])
        p_value = (1 + (calibration["ood_scores"] >= ood_score[:, None]).sum(1)) / (n + 1)
        half = calibration["residuals"][math.ceil((n + 1) * policy["coverage"] - 1e-9) - 1] * np.hypot(
            aleatoric, epistemic
        )
        ends = np.stack([mean - half, mean + half], axis=1)
        interval = ends.astype(np.float32)
        outward = np.nextafter(interval, np.float32([-np.inf, np.inf]))
        interval = np.where((interval - ends) * [-1, 1] < 0, outward, interval)
        width = interval[:, 1] - interval[:, 0]
        uncertain = np.zeros(len(z), bool) if policy["max_width"] is None else width > policy["max_width"]
        decision = ["abstain_ood" if o else "abstain_uncertain" if u else "accept"
                    for o, u in zip(p_value <= policy["alpha"], uncertain, strict=True)]  # fmt: skip
        return ValueAnswer(log_density, p_value, mean, aleatoric, epistemic, interval, decision)

    def answer(self, features: list[Array], logits: Array | None = None) -> Answer:
        """Outputs and decisions from the features of each chosen layer, or the original network's logits."""
        policy = self.manifest["policy"]
        features = [np.asarray(f, np.float64) for f in features]
        layers = len(self.manifest["layers"])
        chosen, early = features[:layers], features[-1] if len(features) > layers else None
        z = self.project(chosen)
        log_density = self.log_density(z, features)
        averaged = [f.mean(2) for f in chosen] if self.manifest["head"].get("layers") else []
        probabilities, epistemic = self.classify(np.concatenate([z, *averaged], axis=1), logits)
        if added := self.manifest.get("added_classes"):
            t = self.tensors("density")
            w = _coordinates(t, self.manifest["density"]["kind"], self._density_input(z, features))
            near = w @ t["centres"].T - (t["centres"] ** 2).sum(1) / 2
            for each in added:
                at = probabilities.shape[1]
                s = each["slope"] * (near[:, at] - _log_sum_exp(near[:, :at])) + each["bias"]
                q = 1 / (1 + np.exp(-s))
                probabilities = np.concatenate([probabilities * (1 - q)[:, None], q[:, None]], axis=1)
                epistemic = epistemic * (1 - q)
        entropy = _entropy(probabilities)
        ood_score = -log_density
        check_p_values = np.empty((len(z), 0))
        if "checks" in self.manifest:
            ood_score, check_p_values = self.checks(early, log_density, probabilities, self._density_input(z, features))
        p_value = self.p_values(ood_score)
        is_ood, ambiguous = p_value <= policy["alpha"], entropy > policy["ambiguity_threshold"]
        members = probabilities >= self.set_threshold()
        members[np.arange(len(z)), probabilities.argmax(1)] = True
        decision = ["abstain_ood" if o else "abstain_ambiguous" if a else "accept"
                    for o, a in zip(is_ood, ambiguous, strict=True)]  # fmt: skip
        classes = (probabilities, entropy, epistemic, members, decision)
        return Answer(z, log_density, p_value, check_p_values, is_ood, *classes)


def _coordinates(t: dict[str, Array], kind: str, z: Array) -> Array:
    """w of a density."""
    if kind in ("gda++", "mahalanobis++", "pooled++"):
        z = z / np.maximum(np.linalg.norm(z, axis=1, keepdims=True), np.finfo(z.dtype).tiny)
    coordinates: Array = (z - t["mean"]) @ t["basis"]
    return coordinates


def _pool(features: Array, m: int) -> Array:
    batch, channels, k = features.shape
    if k == m:
        return features
    side, kept = math.isqrt(k), math.isqrt(m)
    if side**2 == k and kept**2 == m:
        maps = features.reshape(batch, channels, side, side)
        return _average(_average(maps, 2, kept), 3, kept).reshape(batch, channels, m)
    return _average(features, 2, m)


def _average(x: Array, axis: int, m: int) -> Array:
    k = x.shape[axis]
    spans = [range(i * k // m, -((i + 1) * k // -m)) for i in range(m)]
    return np.stack([x.take(list(span), axis=axis).mean(axis=axis) for span in spans], axis=axis)


def _laplace(t: dict[str, Array], phi: Array) -> tuple[Array, Array]:
    mean = phi @ t["weight"].T + t["bias"]
    v = (phi @ t["input_vectors"]) ** 2 @ t["weight_spectrum"] + t["bias_spectrum"]
    vectors = t["output_vectors"]

    def probit(columns: Array) -> Array:
        return _softmax(mean / np.sqrt(1 + math.pi / 8 * (v @ (columns**2).T)))

    p = probit(vectors - vectors.mean(0))
    delta = (v * np.maximum(0, p @ vectors**2 - (p @ vectors) ** 2)).sum(1) / 2
    h = _entropy(p)
    with np.errstate(invalid="ignore", divide="ignore"):
        epistemic = np.where(h > 0, h * (1 - np.exp(-delta / h)), 0.0)
    return probit(vectors), epistemic


def _sngp(t: dict[str, Array], phi: Array) -> tuple[Array, Array]:
    psi = math.sqrt(2) * np.cos(phi @ t["frequencies"] + t["phases"])
    variance = ((psi @ t["covariance_root"]) ** 2).sum(1)
    mean = psi @ t["weight"].T + t["bias"]
    return _softmax(mean / np.sqrt(1 + math.pi / 8 * variance)[:, None]), variance


def _duq(t: dict[str, Array], phi: Array) -> tuple[Array, Array]:
    difference = (phi @ t["embedding"])[:, None] - t["centroids"]
    log_kernels = -(difference**2).sum(2) / (2 * phi.shape[1] * t["length_scale"] ** 2)
    logits = t["exponent"] * log_kernels
    return _softmax(logits), -np.expm1(log_kernels.max(1))


def _blr(t: dict[str, Array], phi: Array) -> tuple[Array, Array, Array]:
    epistemic = np.sqrt(((phi @ t["root"]) ** 2).sum(1) + t["bias_deviation"] ** 2)
    aleatoric = np.exp(np.clip(phi @ t["noise_weight"] + t["noise_bias"], *t["log_noise_range"]) / 2)
    return phi @ t["weight"] + t["bias"], aleatoric, epistemic


def _dve(t: dict[str, Array], phi: Array) -> tuple[Array, Array, Array]:
    m, rows = int(t["neighbours"]), []
    for image in phi:
        layers = []
        for basis, points, s, noise in zip(t["basis"], t["points"], t["signal"], t["noise"], strict=True):
            x = image @ basis
            near = np.argsort(((points - x) ** 2).sum(1), kind="stable")[:m]
            chosen = np.concatenate([points[near], x[None]]).astype(np.float64)
            r = math.sqrt(5) * np.sqrt(((chosen[:, None] - chosen) ** 2).sum(2))
            k = s * (1 + r + r**2 / 3) * np.exp(-r)
            weights = np.linalg.solve(k[:m, :m] + noise * np.eye(m), k[:m, m])
            layers.append((weights @ t["values"][near], s - weights @ k[:m, m] + noise))
        means, variances = np.array(layers).T
        beta = np.maximum(0, np.log((t["signal"] + t["noise"]) / variances) / 2) + 1e-6
        w = beta / beta.sum() / variances
        variance = 1 / w.sum()
        of_noise = variance * (w * t["noise"] / variances).sum() / w.sum()
        rows.append((variance * (w * means).sum(), of_noise, variance - of_noise))
    mean, of_noise, left = np.array(rows).T
    unit = t["value_scale"] * t["deviation_factor"]
    return t["value_center"] + t["value_scale"] * mean, unit * np.sqrt(of_noise), unit * np.sqrt(np.maximum(0, left))


def _log_sum_exp(x: Array) -> Array:
    top = x.max(1)
    result: Array = top + np.log(np.exp(x - top[:, None]).sum(1))
    return result


def _softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(1, keepdims=True))
    result: Array = powers / powers.sum(1, keepdims=True)
    return result


def _entropy(p: Array) -> Array:
    result: Array = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(1)
    return result
