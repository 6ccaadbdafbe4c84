"""Is an image the same when it is built again from nothing? And if not, which file differs first?"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

from env.build import Base, build, build_archive
from env.caches import CacheDirs
from env.engines import Engine
from env.errors import EnvError
from env.image import engine_argv
from env.output import output_of

Entry = tuple[str, int, int, int, int, str]
"""(kind and mode, uid, gid, mtime in seconds, size, sha256 of the content or the link's target)"""
_FIELDS = ("mode", "owner", "group", "time", "size", "content")


def check_same_twice(
    root: Path, caches: CacheDirs, engine: Engine, *, base: Base = "auto", say: Callable[[str], None] = print
) -> str:
    """Build the image again from nothing, base and all, and return the digest that both have.

    Raises EnvError (exit 3) that names the first difference. The image is the new one afterwards.
    """
    if engine.name == "docker":
        return _check_archives(root, caches, engine, base, say)
    first = build(root, caches, engine, base=base, say=say)
    kept = f"{first['name']}-first"
    run = [*engine_argv(engine), "tag", first["name"], kept]
    if output_of(run) is None:
        raise EnvError("the image cannot be tagged", where=first["name"], fix="Is it still there? Run: invoke build")
    try:
        second = build(root, caches, engine, base=base, scratch=True, like=first, say=say)
        if second["digest"] != first["digest"]:
            try:
                with mounted(engine, kept) as a, mounted(engine, second["name"]) as b:
                    difference = first_difference(a, b) or "no file; the configuration or the layers differ"
            except EnvError as error:
                difference = f"unknown ({error})"
            packages = _changed(first["packages"]["debian"], second["packages"]["debian"])
            why = f" Packages that changed on the index meanwhile: {packages}." if packages else ""
            raise EnvError(
                f"two builds differ: {first['digest']} and {second['digest']}; first difference: {difference}.{why}",
                where=first["name"],
                fix="Find what writes it in the Dockerfile.",
            )
    finally:
        output_of([*engine_argv(engine), "rmi", kept])
    say(f"Built again from nothing, same digest: {second['digest']}")
    return str(second["digest"])


def _check_archives(root: Path, caches: CacheDirs, engine: Engine, base: Base, say: Callable[[str], None]) -> str:
    """For docker: its image store keeps build times, so two archives with rewritten times are compared."""
    if "containerd" not in (output_of(["docker", "info", "--format={{.DriverStatus}}"]) or ""):
        what, fix = (
            "docker's image store cannot write OCI archives",
            "Turn on its containerd image store, or: --engine podman",
        )
        raise EnvError(what, where="invoke build --check", fix=fix)
    with tempfile.TemporaryDirectory(prefix=".check-", dir=caches.root) as folder:
        archives = [Path(folder) / f"{number}.tar" for number in (1, 2)]
        for archive in archives:
            build_archive(root, caches, engine, archive, base=base, say=say)
        digests = [archive_digest(archive) for archive in archives]
        if digests[0] != digests[1]:
            difference = first_archive_difference(*archives) or "no file; the configuration differs"
            what = f"two builds differ: {digests[0]} and {digests[1]}; first difference: {difference}"
            raise EnvError(what, where="invoke build --check", fix="Find what writes it in the Dockerfile.")
    say(f"Built twice from nothing, one digest: {digests[0]}")
    return digests[0]


def first_difference(a: Path, b: Path) -> str | None:
    """Return the first path, in name order, in which two file systems differ, and how; None when they are equal."""
    return _first(_tree(a), _tree(b))


def first_archive_difference(a: Path, b: Path) -> str | None:
    """The same for two OCI archives, layer by layer."""
    nothing: dict[str, Entry] = {}
    for number, (one, two) in enumerate(zip_longest(_layers(a), _layers(b), fillvalue=nothing)):
        if difference := _first(one, two):
            return f"layer {number}: {difference}"
    return None


def archive_digest(archive: Path) -> str:
    """Return the digest of an OCI archive's image manifest."""
    with tarfile.open(archive) as tar:
        return str(_json(tar, "index.json")["manifests"][0]["digest"])


def _first(a: dict[str, Entry], b: dict[str, Entry]) -> str | None:
    for name in sorted({*a, *b}):
        if name not in a or name not in b:
            return f"{name} is only in the {'second' if name not in a else 'first'} build"
        if a[name] != b[name]:
            changed = [field for field, x, y in zip(_FIELDS, a[name], b[name], strict=True) if x != y]
            return f"{name} ({', '.join(changed)})"
    return None


def _tree(root: Path) -> dict[str, Entry]:
    found = {}
    for folder, folders, files in os.walk(root):
        for name in [*folders, *files]:
            path = Path(folder) / name
            about = path.lstat()
            kind = stat.filemode(about.st_mode)
            content, size = "", 0
            if stat.S_ISREG(about.st_mode):
                size = about.st_size
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
            elif stat.S_ISLNK(about.st_mode):
                content = os.readlink(path)
            found[path.relative_to(root).as_posix()] = (
                *(kind, about.st_uid, about.st_gid, int(about.st_mtime), size),
                content,
            )
    return found


def _layers(archive: Path) -> Iterator[dict[str, Entry]]:
    with tarfile.open(archive) as tar:
        index = _json(tar, "index.json")
        manifest = _json(tar, _blob(index["manifests"][0]["digest"]))
        for layer in manifest["layers"]:
            file = tar.extractfile(_blob(layer["digest"]))
            assert file is not None
            with tarfile.open(fileobj=file, mode="r:*") as members:
                found: dict[str, Entry] = {}
                for member in members:
                    body = members.extractfile(member) if member.isreg() else None
                    content = hashlib.sha256(body.read()).hexdigest() if body else member.linkname
                    kind = f"{member.type!r} {member.mode:o}"
                    found[member.name] = (
                        *(kind, member.uid, member.gid, int(member.mtime), member.size),
                        content,
                    )
                yield found


def _blob(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def _json(tar: tarfile.TarFile, name: str) -> Any:
    file = tar.extractfile(name)
    assert file is not None
    return json.load(file)


def _changed(a: dict[str, str], b: dict[str, str]) -> str:
    names = [name for name in sorted({*a, *b}) if a.get(name) != b.get(name)]
    return ", ".join(f"{name} {a.get(name)} -> {b.get(name)}" for name in names[:5])


@contextmanager
def mounted(engine: Engine, name: str) -> Iterator[Path]:
    """Yield the image's file system, read in place."""
    if engine.name == "podman":
        argv = engine_argv(engine)
        folder = output_of([*argv, "image", "mount", name])
        leave = [[*argv, "image", "unmount", name]]
    else:
        container = output_of(["buildah", "from", name]) or ""
        folder = output_of(["buildah", "mount", container])
        leave = [["buildah", "umount", container], ["buildah", "rm", container]]
    if not folder:
        fix = "As a user without root, run it inside: podman unshare"
        raise EnvError("the image's files cannot be mounted", where=name, fix=fix)
    try:
        yield Path(folder)
    finally:
        for command in leave:
            output_of(command)
