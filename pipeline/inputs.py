"""Files of the user that a run was made from. The run's name is a hash of its configuration, which holds their names
only, so a run that is finished must not be taken for one of the same files with other content."""

from __future__ import annotations

from pathlib import Path

from pipeline.config import RunConfig
from pipeline.errors import DataError
from pipeline.files import expand_user, sha256_file
from pipeline.runs import Run, read_manifest


def input_files(config: RunConfig) -> dict[str, str]:
    """Return the sha256 of each local file that prompts come from."""
    sources = [*(source.source for source in config.data.train), config.data.out_of_domain.source]
    paths = {source: expand_user(source) for source in sources if source.endswith(".jsonl")}
    return {source: sha256_file(path) for source, path in paths.items() if path.is_file()}


def check_inputs(run: Run) -> None:
    """Raise DataError when a prompts file is not the one that the run's cache stage read."""
    manifest = read_manifest(run.manifest_path("cache"))
    if manifest is None or not isinstance(manifest.get("inputs"), dict):
        return
    now = input_files(run.config)
    for source, digest in manifest["inputs"].items():
        if now.get(source) != digest:
            what = "has changed" if Path(source).exists() else "is gone"
            raise DataError(
                f"{what} since {run.id} read it",
                where=source,
                fix="Give the run another name, or rebuild it: invoke train --from-stage cache.",
            )
