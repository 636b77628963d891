"""Bundles over a stand-in for the Hugging Face hub, with the hub's own client."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from psc_core import PSC, FittedModel, PSCRegressor, load_model
from psc_core.bundle import FILES, read_bundle
from psc_core.errors import BundleError, PSCError, UsageError
from tests.conftest import SHIPPED_BUNDLE
from tests.hub import READER, TOKEN, Commit, Hub, Refused, Repository, served
from tests.psc_core.conftest import ALLOW

client = pytest.importorskip("huggingface_hub", reason="it is the client: pip install 'psc[hub]'")

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # the client's own, in some versions
NAME = "org/digits"
IMAGES = sorted((SHIPPED_BUNDLE / "examples").glob("*.png"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """An empty hub, to which the client goes, without a saved token and with a cache of the test's own."""
    from huggingface_hub import constants

    monkeypatch.delenv("HF_TOKEN", raising=False)
    with served() as found:
        template = f"{found.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        changed = {
            "ENDPOINT": found.address,
            "HUGGINGFACE_CO_URL_TEMPLATE": template,
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_TOKEN_PATH": str(tmp_path / "no-token"),
            "HF_HUB_DISABLE_XET": True,
        }
        for name, value in changed.items():
            monkeypatch.setattr(constants, name, value)
        yield found


@pytest.fixture(scope="module")
def shipped() -> PSC:
    return PSC.load(SHIPPED_BUNDLE, device="cpu")


def hold(hub: Hub, bundle: Path, **others: bytes) -> Repository:
    """Put the files of a bundle into a public repository."""
    files = {file.name: file.read_bytes() for file in bundle.iterdir() if file.name in FILES}
    hub.repositories[NAME] = Repository(private=False)
    hub.repositories[NAME].add("main", Commit("by hand", {**files, **others}))
    return hub.repositories[NAME]


def test_a_bundle_travels(hub: Hub, shipped: PSC) -> None:
    address = shipped.push_to_hub(NAME, private=True, token=TOKEN, message="First")
    repository = hub.repositories[NAME]
    assert repository.private and [each.message for each in repository.commits] == ["initial commit", "First"]
    assert address == f"{hub.address}/{NAME}/commit/{repository.branches['main']}"
    found = PSC.from_pretrained(NAME, token=TOKEN, device="cpu")
    assert found.version == shipped.version
    assert torch.equal(found.compute(IMAGES).packed, shipped.compute(IMAGES).packed)
    assert found.predict(IMAGES).to_dict() == shipped.predict(IMAGES).to_dict()


@pytest.mark.thorough
def test_another_bundle_replaces_it(hub: Hub, shipped: PSC, tmp_path: Path) -> None:
    shipped.save(tmp_path / "graph", graph=True)
    repository = hold(hub, SHIPPED_BUNDLE, **{"notes.txt": b"mine", "old/head.safetensors": b"mine"})
    before = repository.branches["main"]
    load_model(tmp_path / "graph", device="cpu").push_to_hub(NAME, token=TOKEN)
    names = {file.name for file in (tmp_path / "graph").iterdir()}
    assert set(repository.files) == {*names, "README.md", "notes.txt", "old/head.safetensors"}
    assert "backbone.onnx" in repository.files and "backbone.safetensors" not in repository.files
    now, then = (PSC.from_pretrained(NAME, revision=revision, device="cpu") for revision in (None, before))
    assert now.version == read_bundle(tmp_path / "graph").manifest.version != then.version == shipped.version
    last = repository.branches["main"]
    assert now.push_to_hub(NAME, token=TOKEN).endswith(last) and repository.branches["main"] == last  # no empty commit


def test_a_branch_is_made_and_read(hub: Hub, shipped: PSC) -> None:
    repository = hold(hub, SHIPPED_BUNDLE)
    main = repository.branches["main"]
    for message in ("one", "two"):
        replace(shipped, name=message).push_to_hub(NAME, revision="trial", token=TOKEN, message=message)
    assert repository.branches["main"] == main and [each.message for each in repository.commits[-2:]] == ["one", "two"]
    assert PSC.from_pretrained(NAME, revision="trial", device="cpu").name == "two"


def test_only_the_bundle_is_downloaded_and_once(hub: Hub, shipped: PSC, tmp_path: Path) -> None:
    repository = hold(
        hub, SHIPPED_BUNDLE, **{"model.pkl": b"no", "report.safetensors": b"no", "x/manifest.json": b"no"}
    )
    cache = tmp_path / "elsewhere"
    PSC.from_pretrained(NAME, cache_dir=cache, device="cpu")
    assert {Path(each).name for each in hub.requests if each.startswith("GET") and "resolve" in each} == {
        name for name in repository.files if name in FILES
    }
    assert not any(word in each for each in hub.requests for word in ("pkl", "report", "x/manifest"))
    hub.requests.clear()
    PSC.from_pretrained(NAME, cache_dir=cache, device="cpu")
    assert not any("resolve" in each for each in hub.requests)


@pytest.mark.parametrize("down", ["offline", "no network"])
def test_without_a_network(hub: Hub, shipped: PSC, monkeypatch: pytest.MonkeyPatch, down: str) -> None:
    from huggingface_hub import constants

    hold(hub, SHIPPED_BUNDLE)
    PSC.from_pretrained(NAME, device="cpu")
    hub.requests.clear()
    if down == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert PSC.from_pretrained(NAME, device="cpu").version == shipped.version
    with pytest.raises(UsageError, match="the hub does not answer"):
        PSC.from_pretrained("org/other", device="cpu")
    with pytest.raises(UsageError, match=f"cannot upload to {NAME}: .*check"):
        shipped.push_to_hub(NAME, token=TOKEN)
    assert not hub.requests


@pytest.mark.parametrize("name", ["manifest.json", "head.safetensors"])
def test_an_altered_file_is_refused(hub: Hub, name: str) -> None:
    content = bytearray((SHIPPED_BUNDLE / name).read_bytes())
    content = content.replace(b"4000", b"4001") if name.endswith("json") else content[:-1] + bytes([content[-1] ^ 1])
    hold(hub, SHIPPED_BUNDLE, **{name: bytes(content)})
    with pytest.raises(BundleError, match=r"copy the bundle again|expected"):
        PSC.from_pretrained(NAME, device="cpu")


def test_factories_are_refused_as_in_a_folder(hub: Hub, tiny_bundle: Path) -> None:
    hold(hub, tiny_bundle)
    with pytest.raises(BundleError, match="allow"):
        PSC.from_pretrained(NAME, device="cpu")
    assert PSC.from_pretrained(NAME, device="cpu", allow_factories=ALLOW).name == "bundle"


def test_a_folder_and_any_task(hub: Hub, angle_bundle: Path) -> None:
    assert type(FittedModel.from_pretrained(SHIPPED_BUNDLE, device="cpu")) is PSC
    assert type(FittedModel.from_pretrained(str(angle_bundle), device="cpu", allow_factories=ALLOW)) is PSCRegressor
    with pytest.raises(BundleError, match="of a regression"):
        PSCRegressor.from_pretrained(SHIPPED_BUNDLE, device="cpu")
    assert not hub.requests


@pytest.mark.parametrize(
    ("name", "options", "error", "text"),
    [
        ("org/missing", {}, UsageError, "does not exist or is private"),
        ("org/missing", {"token": TOKEN}, UsageError, "does not exist or is private"),
        ("org/private", {}, UsageError, "does not exist or is private"),
        ("org/digits", {"revision": "v9"}, UsageError, "no such revision"),
        ("org/empty", {}, BundleError, "holds no bundle"),
        ("./missing", {}, UsageError, "neither a folder nor"),
        ("org/digits", {"token": f"{TOKEN}\n"}, UsageError, "in one line"),
        ("org/digits", {"token": f"{TOKEN}…"}, UsageError, "ASCII"),
    ],
)
def test_what_cannot_be_downloaded(
    hub: Hub, caplog: pytest.LogCaptureFixture, name: str, options: dict[str, str], error: type[PSCError], text: str
) -> None:
    hold(hub, SHIPPED_BUNDLE)
    hub.repositories |= {"org/private": Repository(private=True), "org/empty": Repository(private=False)}
    with caplog.at_level("DEBUG"), pytest.raises(error, match=text) as caught:
        PSC.from_pretrained(name, device="cpu", **options)
    shown = "".join(traceback.format_exception(caught.value)) + caplog.text
    assert TOKEN not in shown and "During handling" not in shown


@pytest.mark.parametrize(
    ("token", "text"),
    [("hf_OfSomebodyElse", "log in"), (None, "log in"), (READER, "a token that may write"), (f"{TOKEN} \n", "line")],
)
def test_what_cannot_be_uploaded(
    hub: Hub, shipped: PSC, caplog: pytest.LogCaptureFixture, token: str | None, text: str
) -> None:
    with caplog.at_level("INFO"), pytest.raises(UsageError, match=text) as caught:
        shipped.push_to_hub(NAME, token=token)
    shown = "".join(traceback.format_exception(caught.value)) + caplog.text
    assert (token is None or token.strip() not in shown) and not hub.repositories


@pytest.mark.parametrize("private", [True, False])
def test_an_upload_that_others_would_see_or_miss(hub: Hub, shipped: PSC, private: bool) -> None:
    hub.repositories[NAME] = Repository(private=not private)
    with pytest.raises(UsageError, match="already"):
        shipped.push_to_hub(NAME, private=private, token=TOKEN)
    assert len(hub.repositories[NAME].commits) == 1 and not hub.blobs
    assert shipped.push_to_hub(NAME, private=not private, token=TOKEN)


@pytest.mark.parametrize("status", [403, 413])
def test_an_upload_that_the_hub_refuses(hub: Hub, shipped: PSC, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "wanted", Mock(side_effect=Refused(status, message=f"not for {TOKEN}")))
    text = "may not do that" if status == 403 else "status 413; check"
    with pytest.raises(UsageError, match=text) as caught:
        shipped.push_to_hub(NAME, token=TOKEN)
    assert TOKEN not in "".join(traceback.format_exception(caught.value))


def test_without_the_client(shipped: PSC, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for call in (lambda: PSC.from_pretrained(NAME), lambda: shipped.push_to_hub(NAME)):
        with pytest.raises(UsageError, match="huggingface_hub"):
            call()
    assert PSC.from_pretrained(SHIPPED_BUNDLE, device="cpu").version == shipped.version


def test_the_card(hub: Hub, shipped: PSC) -> None:
    shipped.push_to_hub(NAME, token=TOKEN)
    text = hub.repositories[NAME].files["README.md"].decode()
    card = client.ModelCard(text)
    metrics = shipped.report["metrics"]
    assert (card.data.library_name, card.data.pipeline_tag) == ("psc", "image-classification")
    values = {each.metric_type: each.metric_value for each in card.data.eval_results}
    assert values == {"accuracy": metrics["accuracy"], "nll": metrics["nll_nats"], "ece": metrics["ece"]}
    headline = shipped.policy.headline(metrics)
    assert headline[1:] in card.text and "Classes: 10 (0, 1," in card.text
    assert "On 4000 images" in card.text and "| with PSC | 0.8812 | 0.3329 | 0.0102 |" in card.text
    checks = metrics["checks"]
    (auroc,) = (each["auroc"] for each in checks["options"] if each["checks"] == checks["chosen"])
    assert ", ".join(map("{} {:.3f}".format, checks["kinds"], auroc)) in card.text
    assert "Stores 300 training images" in card.text
    assert f'PSC.from_pretrained("{NAME}")' in card.text
    assert f"hf download {NAME} --local-dir bundle && psc-serve --bundle bundle\n" in card.text


def test_the_card_warns(hub: Hub, shipped: PSC) -> None:
    metrics = {**shipped.report["metrics"], "projection": {"warning": "nothing <b>separates</b> the classes"}}
    policy = shipped.policy.model_copy(update={"ambiguity_threshold": -1.0, "risk": None})
    replace(shipped, policy=policy, report={**shipped.report, "metrics": metrics}).push_to_hub(NAME, token=TOKEN)
    text = hub.repositories[NAME].files["README.md"].decode()
    assert "**NOTHING IS ACCEPTED" in text and "## Warnings" in text
    assert "* nothing &lt;b>separates&lt;/b> the classes\n" in text
    assert client.ModelCard(text).data.model_name == shipped.name


def test_the_card_of_a_regression(hub: Hub, angle_bundle: Path) -> None:
    model = load_model(angle_bundle, device="cpu", allow_factories=ALLOW)
    model.push_to_hub("org/angles", token=TOKEN)
    card = client.ModelCard(hub.repositories["org/angles"].files["README.md"].decode())
    assert card.data.pipeline_tag is None and "regression" in card.data.tags
    assert 'PSCRegressor.from_pretrained("org/angles")' in card.text
    assert f"| with PSC | {model.report['metrics']['rmse']:.4g} |" in card.text


def test_downloads_can_be_loaded_from_their_folder(hub: Hub, tmp_path: Path) -> None:
    hold(hub, SHIPPED_BUNDLE)
    snapshot = Path(client.snapshot_download(NAME))
    assert (snapshot / "manifest.json").is_symlink()
    assert json.loads((snapshot / "manifest.json").read_text())["version"] == load_model(snapshot, device="cpu").version
    copy = client.snapshot_download(NAME, local_dir=tmp_path / "bundle")
    assert load_model(copy, device="cpu").name == "dirty-mnist-resnet18"
