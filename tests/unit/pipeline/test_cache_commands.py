"""`python -m pipeline cache`: a configuration's compile cache into a file and out of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from env.cache_volume import publish_manifest
from env.files import atomic_write_json
from pipeline import commands
from pipeline.__main__ import main

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
FACTORS = {"torch": "2.11.0", "triton": "3.6.0", "source": "0" * 64}


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The archive of the quickstart's cache; afterwards DFLASH_CACHE is another, empty place."""
    monkeypatch.setattr(commands, "compile_factors", lambda root: FACTORS)
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "here"))
    key, named = commands._compile_key(commands.load_config(Path(QUICKSTART)), FACTORS)
    folder = tmp_path / "here" / "compile" / key
    (folder / "inductor").mkdir(parents=True)
    (folder / "inductor" / "one.so").write_bytes(b"code")
    atomic_write_json(folder / "factors.json", named)
    publish_manifest(folder)
    assert main(["cache", "--export", str(tmp_path / "cache.tar"), "--config", QUICKSTART]) == 0
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "there"))
    return tmp_path / "cache.tar"


def test_what_is_exported_is_imported_for_the_same_configuration(archive: Path, tmp_path: Path) -> None:
    # The learning rate is in no compiled code, so it is in no key.
    assert main(["cache", "--import", str(archive), "--config", QUICKSTART, "train.learning_rate=1e-4"]) == 0
    (folder,) = (tmp_path / "there" / "compile").iterdir()
    assert (folder / "inductor" / "one.so").read_bytes() == b"code"
    assert json.loads((folder / "factors.json").read_text()).keys() == {*FACTORS, "drafter"}


def test_another_drafter_or_environment_is_one_line_that_names_the_factors(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """pytorch/pytorch#144859: nothing said why a copied cache was not used."""
    monkeypatch.setattr(commands, "compile_factors", lambda root: FACTORS | {"triton": "3.9.0"})
    capsys.readouterr()
    assert main(["cache", "--import", str(archive), "--config", QUICKSTART, "drafter.block_size=8"]) == 3
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert "drafter" in err and "triton 3.6.0 -> 3.9.0" in err and "torch" not in err.partition("key: ")[2]
    assert not (tmp_path / "there").exists()


def test_a_cache_that_nobody_compiled_cannot_be_exported(archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "--export", str(archive), "--config", QUICKSTART, "drafter.block_size=8"]) == 3
    assert "holds nothing that a finished compile published. Run it once" in capsys.readouterr().err


@pytest.mark.parametrize("direction", [[], ["--export", "a", "--import", "b"]])
def test_one_direction_must_be_given(direction: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["cache", *direction, "--config", QUICKSTART])
    assert caught.value.code == 2
