"""A key of the compile cache with made-up files, for tests of who may load and touch them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from env import cache_volume
from env.cache_volume import open_key, publish_manifest

KEY = "0123456789abcdef"
FACTORS = {"torch": "2.11.0", "triton": "3.6.0", "gpu_capability": "9.0", "source": "ab" * 32}
FILES = {
    "inductor/ab/one.so": b"machine code",
    "inductor/ab/one.cpp": b"source",
    "inductor/fxgraph/xy/key/entry": b"pickle",
    "triton/GROUP/kernel.cubin": b"binary",
    "triton/GROUP/kernel.json": b"{}",
    "triton/OTHER/kernel.cubin": b"another binary",
}


class Volume:
    """A compile folder with one key, and what was said about it."""

    def __init__(self, folder: Path) -> None:
        self.compile_dir, self.folder = folder, folder / KEY
        self.lines: list[str] = []

    def open(self) -> Path:
        return open_key(self.compile_dir, KEY, FACTORS, self.lines.append)

    def end_process(self) -> None:
        """Give up the key, as the kernel does for a process that ends."""
        for handle in cache_volume._in_use.values():
            handle.close()
        cache_volume._in_use.clear()

    def fill(self, files: dict[str, bytes] = FILES) -> None:
        for name, content in files.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_bytes(content)

    def there(self) -> set[str]:
        return {name for name, _ in cache_volume._files(self.folder)}

    def in_quarantine(self, number: int = 1) -> set[str]:
        place = self.compile_dir / "quarantine" / f"{KEY}-{number}"
        return {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}

    @classmethod
    def published(cls, compile_dir: Path) -> Volume:
        """Return a key with FILES that no process uses."""
        made = cls(compile_dir)
        made.open()
        made.fill()
        publish_manifest(made.folder)
        made.end_process()
        made.lines.clear()
        return made


@contextmanager
def own_process() -> Iterator[None]:
    """Let a test be a process of its own: what it opens is in use until its end."""
    before = dict(cache_volume._in_use)
    cache_volume._in_use.clear()
    yield
    for handle in cache_volume._in_use.values():
        handle.close()
    cache_volume._in_use.clear()
    cache_volume._in_use.update(before)
