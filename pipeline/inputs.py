"""What a run is made from: files of the user, and packages or models that must be fetched.

A run's name is a hash of its configuration, which holds the names of files only, so a run that is finished must not be
taken for one of the same files with other content.
"""

from __future__ import annotations

from pathlib import Path

from env.caches import CacheDirs
from pipeline.catalogue import OWN_SOURCE, load_catalogue
from pipeline.config import RunConfig
from pipeline.errors import DataError
from pipeline.files import expand_user, sha256_file
from pipeline.packages import is_fetched
from pipeline.runs import Run, read_manifest


def input_files(config: RunConfig) -> dict[str, str]:
    """Return the sha256 of each local file that prompts come from, and of the drafter that the run goes on with."""
    sources = [*(source.source for source in config.data.train), config.data.out_of_domain.source]
    paths = {source: expand_user(source) for source in sources if Path(source).suffix == ".jsonl"}
    if (folder := config.train.init_from) is not None:
        paths |= {f"{folder}/{name}": expand_user(folder) / name for name in ("config.json", "model.safetensors")}
    return {source: sha256_file(path) for source, path in paths.items() if path.is_file()}


def check_inputs(run: Run) -> None:
    """Raise DataError when a file is not the one that the run's cache stage read."""
    manifest = read_manifest(run.manifest_path("cache"))
    if manifest is None or not isinstance(manifest.get("inputs"), dict):
        return
    now = input_files(run.config)
    for source, digest in manifest["inputs"].items():
        if now.get(source) != digest:
            what = "has changed" if expand_user(source).exists() else "is gone"
            raise DataError(
                f"{what} since {run.id} read it",
                where=source,
                fix="Give the run another name, or rebuild it: invoke train --from-stage cache.",
            )


def local_sources(config: RunConfig) -> list[str]:
    """Return the configuration's paths on this machine, as written: what a container must be given."""
    catalogue = load_catalogue()
    sources = [config.target.source, *(source.source for source in config.data.train), config.data.out_of_domain.source]
    sources += [config.train.init_from] if config.train.init_from is not None else []
    named = {*catalogue.targets, *catalogue.data, OWN_SOURCE}
    # A hub id comes with a revision; everything else that no list names can only be a path.
    is_hub_id = config.target.revision is not None
    return sorted({s for s in sources if s not in named and not (is_hub_id and s == config.target.source)})


def to_fetch(config: RunConfig, caches: CacheDirs, *, again: bool = False) -> list[str]:
    """Return what a run of `config` would download now: packages that the cache lacks, and a target on the hub.

    No package once its cache stage is finished, unless that runs `again`: later stages read what it left. A hub id
    always counts: only the hub's client knows whether its own cache, which differs from place to place, holds it all.
    """
    hub = [config.target.source] if config.target.revision is not None else []
    run = Run(caches.runs / config.run_id(), config)
    if (read_manifest(run.manifest_path("cache")) or {}).get("finished") and not again:
        return hub
    catalogue = load_catalogue()
    sources = [source.source for source in config.data.train] + [config.data.out_of_domain.source]
    packages = [catalogue.data[name].package for name in sources if name in catalogue.data]
    target = config.target.source
    if target in catalogue.targets:
        packages.append(catalogue.targets[target].package)
    missing = sorted({p for p in packages if not is_fetched(p, catalogue.packages[p], caches.packages)})
    return [*missing, *hub]
