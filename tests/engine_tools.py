"""Container engines made of a shell script, so that no test needs, or touches, a real one.

The script notes how it was called, keeps "images" as files, and answers what env/ asks of an engine.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from env.build import build
from env.caches import CacheDirs
from env.engines import Engine
from env.image import COPIED

PODMAN, DOCKER, BUILDAH = (Engine(name=name, why=f"{name} works") for name in ("podman", "docker", "buildah"))
REGISTRY = "debian:bookworm-slim@sha256:" + "a" * 64

_SCRIPT = r"""#!/bin/sh
printf '%s\n' "NAME $*" >> "$S/log"
last= before=
for word; do before=$last last=$word; done
key=${last##*/} from=${before##*/}
show() { if [ -f "$1" ]; then "$CAT" "$1"; else echo "no such thing" >&2; exit 1; fi; }
case " $* " in
*" run "*)
  show "$S/run_prints"
  [ ! -f "$S/run_code" ] || exit "$("$CAT" "$S/run_code")" ;;
*" build "*)
  n=1
  while [ -d "$S/contexts/$n" ]; do n=$((n + 1)); done
  "$CP" -R "$last" "$S/contexts/$n"
  for word; do
    case $word in
    --secret=id=packages,src=*) "$CP" "${word#*src=}" "$S/secrets" ;;
    --tag=*) tag=${word##*/} ;;
    --output=type=oci,dest=*) dest=${word#*dest=}; "$CP" "$S/archives/$n" "${dest%%,*}" ;;
    esac
  done
  if [ -f "$S/build_fails" ]; then "$CAT" "$S/build_fails" >&2; exit 1; fi
  echo "id-$n" > "$S/images/$tag"
  if [ -f "$S/always_new" ]; then echo "digest-$n"; else echo digest-same; fi > "$S/images/$tag.digest" ;;
*" version "* | *" --version "*) echo 1.0 ;;
*" info "*) echo io.containerd.snapshotter.v1 ;;
*"{{.Id}}"* | *"{{.FromImageID}}"*) show "$S/images/$key" ;;
*"{{.Digest}}"* | *"{{.FromImageDigest}}"*) show "$S/images/$key.digest" ;;
*"{{.Size}}"*) show "$S/images/$key" > /dev/null; echo 1230000000 ;;
*"{{json .Config}}"*) show "$S/config" ;;
*" tag "*) "$CP" "$S/images/$from" "$S/images/$key" || exit 1 ;;
*" rmi "*) "$RM" "$S/images/$key" ;;
*" mount "*) show "$S/mounts/$key" ;;
*" from "*) echo "container-of-$key" ;;
*" create "*) echo a-container ;;
*" export "*) show "$S/rootfs.tar" ;;
*" unmount "* | *" umount "* | *" rm "*) ;;
*) echo "the fake NAME does not know: $*" >&2; exit 64 ;;
esac
"""

SAYS = {"files": [], "fetch": [], "python": {"torch": "2.11.0"}, "debian": {"tini": "0.19"}}
"""What a container prints: the answer of `needs` and the list of packages in one."""


@dataclass(frozen=True)
class FakeEngines:
    """`bin` is a PATH with nothing but fakes and git; `state` is what they know.

    Files of `state` that steer them: build_fails (its content is the message), always_new (each build has another
    digest), run_prints, run_code, config (of an image), rootfs.tar, mounts/<image> (the place of its files), of buildah
    mounts/container-of-<image>, archives/<number of the build>.
    """

    bin: Path
    state: Path

    @classmethod
    def make(cls, folder: Path, *names: str) -> FakeEngines:
        made = cls(folder / "bin", folder / "state")
        for name in ("contexts", "images", "mounts", "archives"):
            (made.state / name).mkdir(parents=True)
        made.bin.mkdir()
        git = shutil.which("git")
        assert git is not None
        (made.bin / "git").symlink_to(git)
        made.prints(SAYS)
        for name in names:
            made.add(name)
        return made

    def add(self, name: str) -> None:
        """Let the host have docker, podman or buildah."""
        values: dict[str, object] = {"CAT": shutil.which("cat"), "CP": shutil.which("cp"), "RM": shutil.which("rm")}
        settings = "".join(f"{key}={shlex.quote(str(value))}\n" for key, value in {**values, "S": self.state}.items())
        self.program(name, _SCRIPT.replace("#!/bin/sh\n", f"#!/bin/sh\n{settings}").replace("NAME", name))

    def program(self, name: str, text: str) -> None:
        """Put a program on the PATH."""
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let this process find only the fakes, and none of this machine's package index or certificates."""
        monkeypatch.setenv("PATH", str(self.bin))
        for name in list(os.environ):
            if name.upper().startswith(("DFLASH_", "UV_", "PIP_")) or name.upper().endswith("PROXY"):
                monkeypatch.delenv(name)
        for name in ("SSL_CERT_FILE", "HF_TOKEN", "HF_ENDPOINT"):
            monkeypatch.delenv(name, raising=False)

    def prints(self, value: dict[str, Any]) -> None:
        (self.state / "run_prints").write_text(json.dumps(value) + "\n")

    def calls(self, word: str = "") -> list[str]:
        """Return the command lines so far that hold `word` as a word of its own."""
        log = self.state / "log"
        lines = log.read_text().splitlines() if log.is_file() else []
        return [line for line in lines if not word or word in line.split()]

    def context(self, number: int) -> Path:
        """Return a copy of the build context of the `number`th build, counted from 1."""
        return self.state / "contexts" / str(number)


def make_checkout(root: Path) -> Path:
    """Make a small checkout without version control: a file in each folder of the image, the pins, and a README."""
    for folder in COPIED:
        (root / folder).mkdir(parents=True)
        (root / folder / "a.py").write_text(f"# {folder}\n")
    (root / "lockfiles/runtime.txt").write_text("numpy==2.0 \\\n    --hash=sha256:1\ntorch==2.11.0 \\\n")
    lines = [f"registry: {REGISTRY}", "suite: bookworm", "packages: [g++, tini]", "epoch: 1795824000"]
    (root / "lockfiles/images.yaml").write_text("\n".join(lines) + "\n")
    for name in ("Dockerfile", ".dockerignore", "LICENSE", "README.md"):
        (root / name).write_text(f"{name}\n")
    return root


def git(root: Path, *arguments: str) -> str:
    """Run git there as somebody, and return what it prints."""
    who = ["-c", "user.name=A", "-c", "user.email=a@b.invalid"]
    done = subprocess.run(["git", "-C", str(root), *who, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit_all(root: Path) -> Path:
    """Make a repository of one commit of it."""
    (root / ".gitignore").write_text(".cache/\n*.log\n")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "first")
    return root


def caches_of(root: Path) -> CacheDirs:
    """Return the default places of a checkout."""
    return CacheDirs.from_environment(root, {})


def build_with(root: Path, engine: Engine = PODMAN, **how: Any) -> dict[str, Any]:
    """Build `root` on the registry's base, saying nothing."""
    return build(root, caches_of(root), engine, **{"base": "registry", "say": lambda line: None, **how})


def modes_of(folder: Path) -> dict[str, int]:
    """Return {file below `folder`: its permissions}."""
    return {p.relative_to(folder).as_posix(): p.stat().st_mode & 0o777 for p in folder.rglob("*") if p.is_file()}
