"""The Dockerfile, as text: it agrees with what env/image.py sends, and nothing in it leaks, roams or runs as root."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from env.image import COPIED, LOOSE


@pytest.fixture
def dockerfile(repository: Path) -> list[str]:
    """Return the instructions of the Dockerfile, each on one line, without comments."""
    lines = [line for line in (repository / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    return [line.strip() for line in "\n".join(lines).replace("\\\n", " ").splitlines() if line.strip()]


def _values(dockerfile: list[str], instruction: str) -> list[str]:
    return [line.split(None, 1)[1] for line in dockerfile if line.split()[0] == instruction]


def _disagreements(copies: list[str], ignore: list[str]) -> set[str]:
    """Return what the Dockerfile copies, .dockerignore lets through and env/image.py names, where they differ."""
    words = {word.rstrip("/") for copy in copies for word in copy.split()[:-1]}
    copied = {"image.json" if word == "image.jso[n]" else word.partition("/")[0] for word in words}
    let_through = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    known = {*COPIED, *LOOSE, "image.json"} - {"Dockerfile", ".dockerignore"}
    return (copied | let_through | known) - (copied & let_through & known)


def test_the_dockerfile_and_dockerignore_and_the_context_hold_the_same(repository: Path, dockerfile: list[str]) -> None:
    """Else a folder is missing in the image, or changes it without changing its tag."""
    copies = _values(dockerfile, "COPY")
    ignore = (repository / ".dockerignore").read_text().splitlines()
    assert _disagreements(copies, ignore) == set()
    assert _disagreements([*copies, "tests/ tests/"], ignore) == {"tests"}
    assert _disagreements([copy for copy in copies if "env/" not in copy], ignore) == {"env"}
    assert _disagreements(copies, [*ignore, "!runs"]) == {"runs"}
    assert [line for line in ignore if not line.startswith(("#", "!"))] == ["*", "**/__pycache__"]
    assert all((repository / folder).is_dir() for folder in COPIED)


def test_folders_are_copied_to_where_they_came_from(dockerfile: list[str]) -> None:
    for folder in COPIED:
        assert f"{folder}/ {folder}/" in _values(dockerfile, "COPY")
    assert _values(dockerfile, "WORKDIR") == ["/srv/dflash"]


def test_the_image_is_run_by_a_number_that_is_not_root_with_an_init(dockerfile: list[str]) -> None:
    assert dockerfile[-4:-2] == ["USER 10001:10001", "STOPSIGNAL SIGTERM"]  # a number: an orchestrator can check it
    assert _values(dockerfile, "ENTRYPOINT") == ['["/usr/bin/tini", "--", "python", "-m", "env.entrypoint"]']
    assert _values(dockerfile, "USER") == ["10001:10001"]


def test_nothing_is_fetched_past_the_lock_and_no_volume_takes_a_forgotten_mount(dockerfile: list[str]) -> None:
    assert not {"VOLUME", "ADD", "ONBUILD"} & {line.split()[0] for line in dockerfile}
    assert _values(dockerfile, "FROM") == ["${BASE_IMAGE}"] and "BASE_IMAGE" in _values(dockerfile, "ARG")
    commands = [command for line in _values(dockerfile, "RUN") for command in line.split(";")]
    installs = [command for command in commands if " pip sync " in command or "pip install " in command]
    assert len(installs) == 2 and all("--require-hashes" in command for command in installs)
    assert [re.findall(r"/tmp/locks/\w+\.txt", command) for command in installs] == [
        ["/tmp/locks/host.txt"],
        ["/tmp/locks/runtime.txt"],
    ]
    assert "--no-build" in installs[1]
    assert not any(re.search(r"\b(curl|wget)\b|https?:", line) for line in dockerfile)


def test_secrets_are_mounted_and_never_arguments_or_variables_of_the_image(dockerfile: list[str]) -> None:
    """An ARG stays in the image's history, an ENV in its configuration."""
    kept = " ".join([*_values(dockerfile, "ARG"), *_values(dockerfile, "ENV"), *_values(dockerfile, "LABEL")])
    assert re.findall(r"(?i)token|password|proxy|index|secret|cert", kept) == []
    mounted = re.findall(r"--mount=type=secret,id=(\w+)", " ".join(dockerfile))
    assert mounted == ["ca", "packages"]


def test_no_cache_of_an_installer_stays_in_a_layer(dockerfile: list[str]) -> None:
    """uv#10047: a cache that is baked in; uv#10523: files of uv that hold times."""
    install = next(line for line in _values(dockerfile, "RUN") if "uv pip sync" in line)
    for word in ("UV_NO_CACHE=1", "--no-cache-dir", "rm -rf /opt/uv /tmp/locks ~/.cache /opt/dflash/.lock"):
        assert word in install
    assert "--mount=type=cache" not in install
