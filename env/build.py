"""`invoke build`: base, context and image, with a manifest of what is in it.

.cache/images/<tag>.json          what the image <tag> holds
.cache/images/base-<hash>.tar     the base that was made here, with its list of packages
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

from env.base import can_make_base, make_base
from env.caches import CacheDirs
from env.engines import ENGINES, Engine, HostFacts, find_engine
from env.errors import EnvError
from env.files import atomic_write_json
from env.image import COPIED, LOOSE, ImagePins, build_argv, content_tag, context_files, engine_argv, image_name
from env.output import output_of

Base = Literal["auto", "debian", "registry"]


def host_engine(wanted: str = "") -> Engine | None:
    """Return the engine of this host that works, with what the host asks of it."""
    return find_engine(wanted, facts=HostFacts.read(uid=os.getuid()))


def building_engine(wanted: str = "") -> Engine:
    """Return the engine that builds here, any or the one `wanted`. Raises EnvError when none works."""
    found = host_engine(wanted)
    if found is None:
        what = f"no container engine ({', '.join(ENGINES)}) works on this host"
        raise EnvError(what, where="invoke build", fix="Install docker or podman; invoke train needs neither.")
    return found


def checked_base(base: str) -> Base:
    """Return `base` if it is one that can be built on. Raises EnvError."""
    if base not in ("auto", "debian", "registry"):
        raise EnvError(f"{base!r} is no base", where="--base", fix="Choose debian or registry.")
    return cast(Base, base)


def build(
    root: Path,
    caches: CacheDirs,
    engine: Engine,
    *,
    base: Base = "auto",
    scratch: bool = False,
    like: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Build the image of this checkout unless it is there, and return its manifest.

    scratch   build everything again, the base too, and keep nothing of earlier layers
    like      manifest of an image of the same content: note its commit, not today's, which may be a later one
    Raises EnvError with the last line of what failed.
    """
    pins = ImagePins.read(root / "lockfiles" / "images.yaml")
    kind = _choose_base(base, pins)
    tag = current_tag(root, kind, pins)
    name = image_name(tag)
    known = read_manifest(caches, tag)
    if known and not scratch and image_id(engine, name) == known["id"]:
        return known
    say(f"Building {name} with {engine.name} ({engine.why}); base: {kind}.")
    with _inputs(root, caches, engine, pins, kind, scratch=scratch, like=like, say=say) as (about, inputs):
        _run(build_argv(engine, name=name, epoch=pins.epoch, scratch=scratch, **inputs), what="the build")
    manifest = {
        "name": name,
        **about,
        "engine": engine.name,
        "id": image_id(engine, name),
        "digest": image_digest(engine, name),
        "size_bytes": _image_size(engine, name),
        "packages": _packages(engine, name),
    }
    path = manifest_path(caches, tag)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_json(path, manifest)
    return manifest


def build_archive(
    root: Path,
    caches: CacheDirs,
    engine: Engine,
    archive: Path,
    *,
    base: Base = "auto",
    say: Callable[[str], None] = print,
) -> None:
    """Build from nothing with docker into an OCI archive; the engine's own images stay as they are."""
    pins = ImagePins.read(root / "lockfiles" / "images.yaml")
    kind = _choose_base(base, pins)
    name = image_name(current_tag(root, kind, pins))
    with _inputs(root, caches, engine, pins, kind, scratch=True, like=None, say=say) as (_, inputs):
        argv = build_argv(engine, name=name, epoch=pins.epoch, scratch=True, archive=archive, **inputs)
        _run(argv, what="the build")


def built_image(root: Path, caches: CacheDirs, engine: Engine) -> dict[str, Any] | None:
    """Return the manifest of the image of this checkout if it is built and the engine still has it."""
    pins = ImagePins.read(root / "lockfiles" / "images.yaml")
    for kind in ("debian", "registry"):
        known = read_manifest(caches, current_tag(root, kind, pins))
        if known and image_id(engine, known["name"]) == known["id"]:
            return known
    return None


def current_tag(root: Path, kind: str, pins: ImagePins) -> str:
    """Return the tag of this checkout's image on the base `kind`."""
    return content_tag(root, context_files(root, _tracked(root)), pins.registry if kind == "registry" else kind)


def manifest_path(caches: CacheDirs, tag: str) -> Path:
    return caches.root / "images" / f"{tag}.json"


def read_manifest(caches: CacheDirs, tag: str) -> dict[str, Any] | None:
    try:
        found = json.loads(manifest_path(caches, tag).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or not {"name", "digest", "size_bytes"} <= found.keys() or not found.get("id"):
        return None
    packages = found.get("packages")
    return found if isinstance(packages, dict) and {"python", "debian"} <= packages.keys() else None


def image_id(engine: Engine, name: str) -> str | None:
    """Return the engine's id of an image (the sha256 of its configuration), None when it has none of that name."""
    if engine.name == "buildah":
        return output_of(["buildah", "inspect", "--type=image", "--format={{.FromImageID}}", name])
    return output_of([*engine_argv(engine), "image", "inspect", "--format={{.Id}}", name])


def image_digest(engine: Engine, name: str) -> str | None:
    """Return the digest of the image's manifest, which covers every byte; of docker, which may not know it, the id."""
    if engine.name == "buildah":
        return output_of(["buildah", "inspect", "--type=image", "--format={{.FromImageDigest}}", name])
    if engine.name == "podman":
        return output_of([*engine_argv(engine), "image", "inspect", "--format={{.Digest}}", name])
    return image_id(engine, name)


def _choose_base(base: Base, pins: ImagePins) -> str:
    if base != "auto":
        return base
    # A registry cannot be asked in general (proxies, credentials); a host that can make the base needs none.
    return "debian" if can_make_base(pins) else "registry"


def _base_image(
    root: Path,
    caches: CacheDirs,
    engine: Engine,
    pins: ImagePins,
    kind: str,
    *,
    scratch: bool,
    say: Callable[[str], None],
) -> tuple[str, str]:
    """Return (base image, packages that the Dockerfile must add to it)."""
    if kind == "registry":
        return pins.registry, " ".join(pins.packages)
    wanted = hashlib.sha256(repr((pins.suite, pins.packages, pins.epoch)).encode()).hexdigest()[:12]
    archive = caches.root / "images" / f"base-{wanted}.tar"
    if scratch or not archive.is_file():
        say(f"Making the base from Debian {pins.suite} packages (about a minute).")
        again = make_base(pins, archive.with_suffix(".new.tar"))
        archive.parent.mkdir(parents=True, exist_ok=True)
        again.with_name(again.name + ".packages").replace(archive.with_name(archive.name + ".packages"))
        again.replace(archive)
    with archive.open("rb") as file:
        name = f"localhost/dflash-base:{hashlib.file_digest(file, 'sha256').hexdigest()[:12]}"
    if scratch or image_id(engine, name) is None:
        with tempfile.TemporaryDirectory(prefix=".base-", dir=archive.parent) as folder:
            os.link(archive, Path(folder) / "base.tar")
            (Path(folder) / "Dockerfile").write_text('FROM scratch\nADD base.tar /\nCMD ["/bin/bash"]\n')
            command = build_argv(
                engine, context=Path(folder), name=name, epoch=pins.epoch, arguments={}, scratch=scratch
            )
            _run(command, what="the base image")
    return name, ""


@contextmanager
def _inputs(
    root: Path,
    caches: CacheDirs,
    engine: Engine,
    pins: ImagePins,
    kind: str,
    *,
    scratch: bool,
    like: Mapping[str, Any] | None,
    say: Callable[[str], None],
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield (image.json, what build_argv needs of this checkout: context, arguments, secrets)."""
    base_image, apt_packages = _base_image(root, caches, engine, pins, kind, scratch=scratch, say=say)
    with _context(root, current_tag(root, kind, pins), base_image, like) as context, _secrets() as secrets:
        about = json.loads((context / "image.json").read_text(encoding="utf-8"))
        arguments = {
            "BASE_IMAGE": base_image,
            "APT_PACKAGES": apt_packages,
            "COMMIT": f"{about['commit']}{'-dirty' if about['dirty'] else ''}",
            "LOCK_SHA256": about["lock_sha256"],
            "TORCH_VERSION": about["torch"],
        }
        yield about, {"context": context, "arguments": arguments, "secrets": secrets}


@contextmanager
def _context(root: Path, tag: str, base_image: str, like: Mapping[str, Any] | None) -> Iterator[Path]:
    """Yield a folder with exactly the files of the image and image.json, so that nothing else can slip in."""
    tracked = _tracked(root)
    with tempfile.TemporaryDirectory(prefix="dflash-context-") as folder:
        context = Path(folder)
        for name in context_files(root, tracked):
            to = context / name
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, to)
            to.chmod(0o755 if os.access(root / name, os.X_OK) else 0o644)
        for path in (context, *(path for path in context.rglob("*") if path.is_dir())):
            path.chmod(0o755)
        lock = root / "lockfiles" / "runtime.txt"
        changes = _git(root, "status", "--porcelain", "--", *COPIED, *LOOSE)
        about = {
            "tag": tag,
            "commit": _git(root, "rev-parse", "HEAD") or "unknown",
            "dirty": None if changes is None else bool(changes),
            "lock_sha256": hashlib.sha256(lock.read_bytes()).hexdigest(),
            "torch": _pinned(lock, "torch"),
            "base": base_image,
        }
        about |= {key: like[key] for key in ("commit", "dirty")} if like else {}
        (context / "image.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        yield context


def _pinned(lock: Path, name: str) -> str:
    lines = lock.read_text(encoding="utf-8").splitlines()
    return next(line.split("==")[1].split()[0] for line in lines if line.startswith(f"{name}=="))


@contextmanager
def _secrets() -> Iterator[dict[str, Path]]:
    """Yield the build's secrets: the CA bundle and the package index of this shell, if it names any."""
    found = {}
    bundle = os.environ.get("SSL_CERT_FILE")
    if bundle and Path(bundle).is_file():
        found["ca"] = Path(bundle)
    names = ("UV_DEFAULT_INDEX", "UV_INDEX", "PIP_INDEX_URL", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY")
    lines = [f"{name}={shlex.quote(os.environ[name])}\n" for name in names if os.environ.get(name)]
    with tempfile.TemporaryDirectory(prefix="dflash-secrets-") as folder:
        if lines:
            found["packages"] = Path(folder) / "packages.env"
            found["packages"].write_text("".join(lines), encoding="utf-8")
        yield found


def _packages(engine: Engine, name: str) -> dict[str, dict[str, str]]:
    """Return {"python": {name: version}, "debian": {name: version}} as the image itself says."""
    script = (
        "import importlib.metadata as m, json, subprocess as s;"
        "d = s.run(['dpkg-query', '-W', '-f', '${Package} ${Version}\\n'], capture_output=True, text=True).stdout;"
        "p = {x.metadata['Name']: x.version for x in m.distributions()};"
        "print(json.dumps({'python': dict(sorted(p.items())), 'debian': dict(l.split() for l in d.splitlines())}))"
    )
    python = "/opt/dflash/bin/python"
    if engine.name == "buildah":
        with _buildah_container(name) as container:
            text = output_of(["buildah", "run", "--isolation=chroot", container, "--", python, "-c", script])
    else:
        from env.image import run_argv

        argv = run_argv(
            engine, name, ["-c", script], mounts=[], user="10001:10001", network=False, gpus=False, entrypoint=python
        )
        text = output_of(argv)
    if text is None:
        raise EnvError("the image was built and does not start", where=name, fix="Run it by hand and see why.")
    found: dict[str, dict[str, str]] = json.loads(text)
    return found


@contextmanager
def _buildah_container(name: str) -> Iterator[str]:
    container = output_of(["buildah", "from", name])
    if container is None:
        raise EnvError("buildah cannot start from the image", where=name, fix="Run: invoke build")
    try:
        yield container
    finally:
        output_of(["buildah", "rm", container])


def _image_size(engine: Engine, name: str) -> int:
    if engine.name == "buildah":  # its inspect has no size
        with _buildah_container(name) as container:
            folder = output_of(["buildah", "mount", container])
            return sum(p.lstat().st_size for p in Path(folder).rglob("*") if p.is_file()) if folder else 0
    return int(output_of([*engine_argv(engine), "image", "inspect", "--format={{.Size}}", name]) or 0)


def _tracked(root: Path) -> list[str] | None:
    # Of another repository, below which a tarball may have been unpacked, nothing is known about our files.
    if _git(root, "rev-parse", "--show-prefix") != "":
        return None
    listing = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    return None if listing is None else [name for name in listing.split("\0") if name]


def _git(root: Path, *arguments: str) -> str | None:
    return output_of(["git", "-C", str(root), *arguments])


def _run(command: list[str], *, what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        for line in lines[-15:]:
            print(line, flush=True)
        raise EnvError(f"{what} failed ({(lines or ['no message'])[-1][:300]})", where=command[0], fix="See above.")
