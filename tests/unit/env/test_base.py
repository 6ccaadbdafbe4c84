"""The base that is made from Debian packages, with made-up apt-get and mmdebstrap."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from env.base import apt_sources, make_base, mmdebstrap_argv
from env.errors import EnvError
from env.image import ImagePins
from tests.engine_tools import FakeEngines

PINS = ImagePins(registry="x@sha256:0", suite="bookworm", packages=("g++", "tini"), epoch=1795824000)
TARGETS = """\
http://index.invalid/debian bookworm main Packages
http://index.invalid/debian bookworm main Translations
http://index.invalid/debian bookworm contrib Packages
http://index.invalid/debian bookworm-updates main Packages
http://index.invalid/debian-security bookworm-security main Packages
http://index.invalid/debian trixie main Packages
http://index.invalid/debian bookworm main Packages

http://other.invalid/repo stable extra main Packages
"""

_MMDEBSTRAP = """#!/bin/sh
last= before=
for word; do
  before=$last last=$word
  case $word in *"dpkg-query -W > "*) hook=${word#*=} ;; esac
done
printf '%s\\n' "$SOURCE_DATE_EPOCH" "$@" > "$FAKE_STATE/mmdebstrap"
while read -r line; do printf '%s\\n' "$line"; done < "$last" > "$FAKE_STATE/sources"
echo half > "$before"
[ -z "$FAKE_FAILS" ] || { printf '%s\\n' "$FAKE_FAILS" >&2; exit 1; }
echo whole > "$before"
chroot() { echo "tini 0.19"; }
eval "$hook"
"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEngines:
    fakes = FakeEngines.make(tmp_path)
    fakes.program("apt-get", f"#!/bin/sh\nprintf '%s' '{TARGETS}'\n")
    fakes.program("mmdebstrap", _MMDEBSTRAP)
    fakes.use(monkeypatch)
    monkeypatch.setenv("FAKE_STATE", str(fakes.state))
    monkeypatch.setenv("FAKE_FAILS", "")
    return fakes


def test_the_sources_are_the_suite_and_its_updates_each_once() -> None:
    assert apt_sources(TARGETS, "bookworm") == [
        "deb http://index.invalid/debian bookworm main",
        "deb http://index.invalid/debian bookworm-updates main",
        "deb http://index.invalid/debian-security bookworm-security main",
    ]
    assert apt_sources(TARGETS, "trixie") == ["deb http://index.invalid/debian trixie main"]


@pytest.mark.parametrize("text", ["", TARGETS.replace("bookworm ", "jammy "), "nonsense\n"])
def test_a_host_without_the_suite_is_told_both_ways_out(text: str) -> None:
    """Updates alone are no suite."""
    with pytest.raises(EnvError) as caught:
        apt_sources(text, "bookworm")
    fix = "Add it to apt's sources, or: invoke build --base registry"
    assert str(caught.value) == f"base image: this machine's apt has no 'bookworm' main. {fix}"


def test_a_dot_in_a_suite_is_no_pattern() -> None:
    with pytest.raises(EnvError):
        apt_sources("http://index.invalid/debian book-worm main Packages\n", "book.worm")


def test_backports_are_no_updates() -> None:
    with_backports = TARGETS + "http://index.invalid/debian bookworm-backports main Packages\n"
    assert apt_sources(with_backports, "bookworm") == apt_sources(TARGETS, "bookworm")


def test_the_command_names_every_package_and_leaves_out_what_holds_times() -> None:
    argv = mmdebstrap_argv(PINS, out=Path("/o/b.tar"), sources=Path("/o/s"), packages=Path("/o/p"))
    assert argv[0] == "mmdebstrap" and argv[-3:] == ["bookworm", "/o/b.tar", "/o/s"]
    assert "--variant=minbase" in argv and "--include=g++,tini" in argv
    hooks = " ".join(word for word in argv if word.startswith("--customize-hook="))
    for place in ("etc/resolv.conf", "etc/hostname", "var/log/apt", "var/cache/ldconfig/aux-cache", "0000sources.list"):
        assert place in hooks
    excluded = [word for word in argv if word.startswith("--dpkgopt=path-exclude")]
    assert len(excluded) == 3 and argv.index("--dpkgopt=path-include=/usr/share/doc/*/copyright") > argv.index(
        excluded[-1]
    )  # dpkg's last match counts: licences stay


def test_a_base_is_published_with_the_list_of_its_packages(host: FakeEngines, tmp_path: Path) -> None:
    out = tmp_path / "my cache/images/base.tar"  # the folder is not there yet, and has a space
    assert make_base(PINS, out) == out
    assert out.read_text() == "whole\n"
    assert sorted(path.name for path in out.parent.iterdir()) == ["base.tar", "base.tar.packages"]
    assert (out.parent / "base.tar.packages").read_text() == "tini 0.19\n"
    assert (host.state / "mmdebstrap").read_text().startswith("1795824000\n--variant=minbase\n")
    assert (host.state / "sources").read_text().splitlines() == apt_sources(TARGETS, "bookworm")


def test_a_cache_folder_with_a_quote_in_its_name_is_no_trouble(host: FakeEngines, tmp_path: Path) -> None:
    assert make_base(PINS, tmp_path / "it's here/base.tar").is_file()


def test_a_failure_leaves_the_earlier_base_and_nothing_half_made_and_names_no_address(
    host: FakeEngines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "images/base.tar"
    make_base(PINS, out)
    monkeypatch.setenv("FAKE_FAILS", "I: starting\nE: Failed to fetch http://me:pass@index.invalid/x  404\nI: cleanup")
    with pytest.raises(EnvError) as caught:
        make_base(PINS, out)
    line = "base image: mmdebstrap failed (E: Failed to fetch <address>  404). Mend that first."
    assert str(caught.value) == line
    assert out.read_text() == "whole\n"
    assert sorted(path.name for path in out.parent.iterdir()) == ["base.tar", "base.tar.packages"]


@pytest.mark.parametrize(
    "missing, line",
    [
        ("mmdebstrap", "mmdebstrap is not installed and no registry was chosen. apt-get install mmdebstrap, or: "),
        ("apt-get", "apt-get cannot say where its packages come from. Use a Debian host, or: "),
    ],
)
def test_a_host_that_is_no_debian_is_told_to_use_a_registry(
    host: FakeEngines, tmp_path: Path, missing: str, line: str
) -> None:
    (host.bin / missing).unlink()
    with pytest.raises(EnvError) as caught:
        make_base(PINS, tmp_path / "images/base.tar")
    assert str(caught.value) == f"base image: {line}invoke build --base registry"
    assert not (tmp_path / "images/base.tar").exists()


def test_an_apt_that_fails_is_one_line_too(host: FakeEngines, tmp_path: Path) -> None:
    host.program("apt-get", "#!/bin/sh\necho broken >&2\nexit 100\n")
    with pytest.raises(EnvError, match="apt-get cannot say where its packages come from"):
        make_base(PINS, tmp_path / "base.tar")


def test_the_hooks_are_valid_shell(tmp_path: Path) -> None:
    """They run as root in the new system: a slip there would remove something of this one."""
    tree = tmp_path / "new system"
    for name in ("etc/apt/sources.list.d", "var/log/apt", "var/cache/ldconfig"):
        (tree / name).mkdir(parents=True)
    gone = ["etc/resolv.conf", "etc/hostname", "etc/apt/sources.list.d/0000sources.list", "var/log/dpkg.log"]
    for name in [*gone, "var/cache/ldconfig/aux-cache", "etc/passwd"]:
        (tree / name).write_text("x")
    argv = mmdebstrap_argv(PINS, out=tmp_path / "b", sources=tmp_path / "s", packages=tmp_path / "p")
    for hook in (word.removeprefix("--customize-hook=") for word in argv if word.startswith("--customize-hook=rm ")):
        subprocess.run(["sh", "-e", "-c", hook, "hook", str(tree)], check=True, env={"PATH": os.defpath})
    left = sorted(path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file())
    assert left == ["etc/passwd"] and not (tree / "var/log/apt").exists()
