"""The cache of converted models: a directory per GGUF file, named by its hash, that appears whole or not at all.

files.py asks it for the converted form of a file. Several processes may convert one file at once: each works in a
directory of its own and the first rename wins. Never changes a directory once it is published.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from aserve.errors import ConfigError

Progress = Callable[[str], None]

_CONVERSION = 1  # raised when gguf_convert.py writes something else for the same file
_STALE_SECONDS = 24 * 3600


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/aserve, or ~/.cache/aserve."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "aserve"


class ConversionCache:
    """Converted models under `root`. `report` hears of work that takes seconds."""

    def __init__(self, root: Path, report: Progress) -> None:
        self.root = root
        self._report = report

    def converted(self, path: Path) -> Path:
        """The Hugging Face directory made from the GGUF file at `path`. Raises ConfigError."""
        return self._published(path, self._digest(path))

    def assembled(self, digest: str, name: str, assemble: Callable[[Path], object]) -> Path:
        """The directory of a GGUF whose digest is known and whose file `assemble` writes where it is told."""
        if self._target(digest).is_dir():
            return self._target(digest)
        with self._scratch() as scratch:
            self._report(f"assembling {name} (once)")
            try:
                assemble(scratch / name)
            except (OSError, ValueError) as error:
                raise ConfigError(f"{name} cannot be assembled in {self.root}: {error}", param="model") from error
            return self._published(scratch / name, digest)

    def _target(self, digest: str) -> Path:
        return self.root / f"{digest[:32]}-v{_CONVERSION}"

    def _published(self, path: Path, digest: str) -> Path:
        target = self._target(digest)
        if target.is_dir():
            return target
        if importlib.util.find_spec("gguf") is None:
            raise ConfigError("reading GGUF needs the gguf package: pip install 'aserve[gguf]'", param="model")
        from aserve.models.gguf_convert import convert

        with self._scratch() as scratch:
            made = scratch / "model"
            made.mkdir()
            self._report(f"converting {path.name} (once)")
            try:
                convert(path, made, self._report)
                made.rename(target)
            except OSError as error:
                if not target.is_dir():  # else another process was first, and its directory is as good
                    raise ConfigError(
                        f"{path.name} cannot be converted in {self.root}: {error}", param="model"
                    ) from error
        return target

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        """A temporary directory on the cache's file system, so that a rename publishes."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            for left in self.root.glob(".making-*"):  # by runs that were killed
                if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                    shutil.rmtree(left, ignore_errors=True)
            scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=self.root))
        except OSError as error:
            raise ConfigError(
                f"the cache directory {self.root} cannot be written ({error}): set XDG_CACHE_HOME to one that can",
                param="model",
            ) from error
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _digest(self, path: Path) -> str:
        """SHA-256 over all files of a split set.

        A large file takes seconds to read, so the digest is noted under what identifies the file: device, inode,
        size and both times. Whatever changes the content changes one of them.
        """
        from aserve.models.gguf import split_paths

        parts = split_paths(path.resolve())
        stats = [part.stat() for part in parts]
        identity = repr([(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in stats])
        note = self.root / "digests" / hashlib.sha256(identity.encode()).hexdigest()[:32]
        try:
            if len(known := note.read_text()) == 64:
                return known
        except OSError:
            pass
        digests = []
        for part in parts:
            with part.open("rb") as file:
                digests.append(hashlib.file_digest(file, "sha256").hexdigest())
        digest = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
        try:
            note.parent.mkdir(parents=True, exist_ok=True)
            fresh = note.with_name(f"{note.name}.{os.getpid()}")
            fresh.write_text(digest)
            fresh.replace(note)
        except OSError:
            pass  # without the note the file is read again next time
        return digest
