from __future__ import annotations

from pathlib import Path

import pytest

from env.errors import EnvError
from env.uvtool import explain_failure, run_uv


def test_a_package_that_is_not_in_the_cache_is_named_when_there_is_no_network(index: Path, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text(f"engine-parts==1.0 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(EnvError, match=r"^lock: no network: the package engine-parts was wanted") as caught:
        run_uv(
            ["pip", "install", "--dry-run", "--target", str(tmp_path / "t"), "-r", "x.txt"], where="lock", cwd=tmp_path
        )
    assert "\n" not in str(caught.value) and caught.value.fix


@pytest.mark.parametrize(
    "text",
    [
        "error: Request failed after 3 retries in 10.3s\ncause: Failed to fetch: http://127.0.0.1:9/simple/torch/\n"
        "cause: error sending request for url (http://127.0.0.1:9/simple/torch/)\ncause: tcp connect error",
        "error: Request failed\ncause: Failed to fetch: http://h/ab/torch-2.11.0-cp311-none.whl\ncause: dns error",
        "error: Failed to download `torch==2.11.0`\ncause: operation timed out",
    ],
)
def test_what_uv_prints_without_a_network_becomes_one_line_without_an_address(text: str) -> None:
    message = str(explain_failure(text, "lockfiles/runtime.txt"))
    assert message.startswith("lockfiles/runtime.txt: no network: the package torch was wanted")
    assert "://" not in message and "\n" not in message


def test_another_failure_keeps_uvs_reason_and_drops_the_address() -> None:
    text = "error: Failed to fetch: http://h/simple/torch/\ncause: HTTP status client error (403 Forbidden)"
    message = str(explain_failure(text, "x"))
    assert message.startswith("x: uv failed: Failed to fetch: <address>") and "403 Forbidden" in message


def test_progress_is_passed_on_and_a_failure_is_not_printed_twice(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fake = tmp_path / "uv"
    fake.write_text("#!/bin/sh\necho 'Downloading torch (506.0MiB)' >&2\necho 'error: disk on fire' >&2\nexit 1\n")
    fake.chmod(0o755)
    with pytest.raises(EnvError, match="disk on fire"):
        run_uv([], where="x", uv=fake, echo=True)
    assert capfd.readouterr().err == "Downloading torch (506.0MiB)\n"
