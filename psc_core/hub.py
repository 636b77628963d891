"""Bundles in repositories of the Hugging Face hub, whose client keeps what it downloads in a cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from psc_core.bundle import FILES, Manifest
from psc_core.errors import BundleError, UsageError, needs
from psc_core.model import FittedModel

TAGS: Final = ("uncertainty", "out-of-distribution-detection", "calibration")
CAUSES: Final = {  # by an error of the client or an answer of the hub; the first that fits counts
    "HFValidationError": "it is neither a folder nor the name ORG/NAME of a repository",
    "RevisionNotFoundError": "it has no such revision; give a branch, a tag or a commit of it",
    "GatedRepoError": "its owners choose who may read it; ask them, then log in with hf auth login or give a token",
    "RepositoryNotFoundError": "it does not exist or is private; check the name, and hf auth login or give a token",
    "status 401": "the hub does not know you; log in with hf auth login, or give a token",
    "status 403": "you may not do that there; ask its owners, or give a token that may write",
    "LocalEntryNotFoundError": "the hub does not answer, and its cache lacks it; check the network and HF_HUB_OFFLINE",
}


def download(source: str | Path, revision: str | None, token: str | bool | None, cache: str | Path | None) -> Path:
    """Return the folder ``source`` or, if there is none, that of the bundle in the repository of this name."""
    if (folder := Path(source).expanduser()).is_dir():
        return folder
    hub = needs(f"there is no folder {source}, and the hub", "hub", "huggingface_hub")
    with _told(f"download {source}", token):
        where = {"revision": revision, "token": token, "cache_dir": cache}
        folder = Path(hub.snapshot_download(str(source), **where, allow_patterns=[*FILES]))
    if not (folder / "manifest.json").exists():
        raise BundleError(f"{source} holds no bundle, it has no manifest.json; upload one with push_to_hub")
    return folder


def upload(
    model: FittedModel, name: str, private: bool | None, token: str | bool | None, revision: str | None, message: str
) -> str:
    """Upload the model's bundle and model card in one commit, and return the commit's address."""
    hub = needs("the hub", "hub", "huggingface_hub")
    with TemporaryDirectory(prefix="psc-") as scratch:
        folder = Path(scratch) / "bundle"
        manifest = model.save(folder)
        (folder / "README.md").write_text(_card(hub, model, manifest, name), encoding="utf-8")
        with _told(f"upload to {name}", token):
            api = hub.HfApi(token=token)
            api.create_repo(name, private=private, exist_ok=True)
            is_private = api.model_info(name).private if private is not None else None
        if is_private != private:
            kind, wanted = ("private", "public") if is_private else ("public", "private")
            raise UsageError(f"{name} is {kind} already; make it {wanted} in its settings, or leave out private")
        with _told(f"upload to {name}", token):
            if revision is not None and not revision.startswith("refs/"):
                api.create_branch(name, branch=revision, exist_ok=True)
            where = {"repo_id": name, "revision": revision, "commit_message": message}
            return str(api.upload_folder(folder_path=folder, **where, delete_patterns=[*FILES]).commit_url)


def _card(hub: Any, model: FittedModel, manifest: Manifest, name: str) -> str:
    """Return the model card, which begins with what the hub itself reads."""
    from psc_core.report import page  # imported here, so that services load no drawing code
    from psc_core.report.content import PREDICTORS, Content, facts_about

    facts = facts_about(Path(), manifest, model.calibration, Content(manifest.version))
    task, metrics = facts.of_task.hub_task, facts.quality.get(PREDICTORS["psc"], {})
    data = hub.ModelCardData(library_name="psc", pipeline_tag=task, tags=[*TAGS, manifest.task_name])
    if task and metrics:
        on = (task, "validation", facts.calibrated_on)
        data.model_name = manifest.name
        data.eval_results = [hub.EvalResult(*on, *metric) for metric in metrics.items()]
    return f"---\n{data.to_yaml()}\n---\n\n{page.card(facts, name)}"


@contextmanager
def _told(task: str, token: str | bool | None) -> Iterator[None]:
    """Tell errors of the client anew, and do not chain them: they may quote a request, and so a token."""
    if isinstance(token, str) and not (token.isascii() and token.isprintable()):
        raise UsageError("expected a token of printable ASCII characters in one line; copy it again")
    try:
        yield
    except Exception as error:  # they have no common base class
        causes: list[Any] = [error]
        while causes[-1].__cause__ is not None:
            causes.append(causes[-1].__cause__)
        answers = [each.response for each in causes if getattr(each, "response", None) is not None]
        names = [f"status {each.status_code}" for each in answers] or [type(causes[-1]).__name__]
        kinds = {*names, *(kind.__name__ for each in causes for kind in type(each).__mro__)}
        known = (text for kind, text in CAUSES.items() if kind in kinds)
        raise UsageError(f"cannot {task}: {next(known, f'{names[0]}; check the network and the disk')}") from None
