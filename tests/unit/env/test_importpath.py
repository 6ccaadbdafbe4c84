"""Modules that shadow locked ones, and code at Python's start, are found where Python itself would find them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from env.importpath import check_shadowing, check_start_hooks
from env.installed import find_distributions

Install = Callable[..., Path]
HOOK = "import os; os.environ['X'] = '1'\n"


@pytest.fixture
def site(tmp_path: Path, install: Install) -> Path:
    install("rich", "15.0.0")
    return install("torch", "2.11.0")


def _shadowing(*path: Path) -> list[str]:
    return [
        str(f) for f in check_shadowing(find_distributions([*map(str, path)]), ("torch", "rich"), [*map(str, path)])
    ]


def _hooks(site: Path, *path: Path) -> list[str]:
    allowed = {name: copies[0] for name, copies in find_distributions([str(site)]).items()}
    return [str(f) for f in check_start_hooks(allowed, [str(site)], [*map(str, path), str(site)])]


@pytest.mark.parametrize("module", ["torch/__init__.py", "torch.py", "rich/__init__.py"])
def test_a_module_before_the_locked_one_is_an_error(site: Path, tmp_path: Path, module: str) -> None:
    file = tmp_path / "other" / module
    file.parent.mkdir(parents=True)
    file.write_text("")
    (line,) = _shadowing(tmp_path / "other", site)
    name = module.partition("/")[0].removesuffix(".py")
    assert line.startswith(f"error: {tmp_path}/other/{name}: is imported instead of the one of {name}==")
    file.unlink()
    assert _shadowing(tmp_path / "other", site) == []


def test_a_later_module_matters_for_torch_and_its_like_only(site: Path, tmp_path: Path) -> None:
    for name in ("torch", "rich"):
        (tmp_path / "other" / name).mkdir(parents=True)
        (tmp_path / "other" / name / "__init__.py").write_text("")
    (line,) = _shadowing(site, tmp_path / "other")
    assert line.startswith(f"error: {tmp_path}/other/torch: is a second torch on the path, beside the one in {site}. ")


def test_a_folder_without_init_shadows_nothing(site: Path, tmp_path: Path) -> None:
    (tmp_path / "other/torch").mkdir(parents=True)
    assert _shadowing(tmp_path / "other", site) == []
    assert (
        subprocess.run(  # as Python itself sees it
            [sys.executable, "-S", "-c", "import torch; torch.VERSION"], env={"PYTHONPATH": f"{tmp_path}/other:{site}"}
        ).returncode
        == 0
    )


def test_a_torch_that_no_distribution_brought_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton/__init__.py").write_text("")
    (line,) = _shadowing(tmp_path)
    assert line.startswith(f"error: {tmp_path}/triton: is a package that no distribution brought. ")


def test_a_second_distribution_is_left_to_the_comparison_with_the_lock(site: Path, install: Install) -> None:
    assert _shadowing(site, install("torch", "2.11.0", into="other")) == []


def test_a_pth_file_with_code_is_an_error_unless_a_locked_package_brought_it(site: Path) -> None:
    (site / "paths.pth").write_text("/opt/more\n# import nothing\n")
    assert _hooks(site) == []
    (site / "patch.pth").write_text(HOOK)
    (line,) = _hooks(site)
    assert line.startswith(f"error: {site}/patch.pth: runs code at every start of Python (import os; os.environ")
    record = site / "rich-15.0.0.dist-info/RECORD"
    record.write_text(record.read_text() + "patch.pth,,\n")
    assert _hooks(site) == []


def test_what_virtualenv_puts_into_every_environment_is_no_hook_but_its_name_is_no_excuse(site: Path) -> None:
    (site / "_virtualenv.pth").write_text("import _virtualenv")
    assert _hooks(site) == []
    (site / "_virtualenv.pth").write_text(HOOK)
    assert len(_hooks(site)) == 1


def test_a_sitecustomize_is_an_error_unless_it_is_the_one_of_the_standard_library(site: Path, tmp_path: Path) -> None:
    """Debian and Ubuntu ship one there; a later one does not run, which -S -c shows is Python's own rule."""
    import sysconfig

    (site / "sitecustomize.py").write_text("")
    (line,) = _hooks(site)
    assert line.startswith(f"error: {site}/sitecustomize: runs at every start of Python")
    library = Path(sysconfig.get_path("stdlib"))
    expected = 0 if (library / "sitecustomize.py").exists() else 1
    assert len(_hooks(site, library)) == expected


def test_this_interpreter_starts_without_hooks_of_others() -> None:
    allowed = {name: copies[0] for name, copies in find_distributions().items()}
    assert check_start_hooks(allowed) == []
