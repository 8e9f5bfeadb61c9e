"""Files of measured times, and what the times were measured on: the key of each of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self
from uuid import uuid4

import msgspec

from backfill.core.durable_files import replace, sync
from backfill.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MeasuredOn:
    """What times were measured on. They are refused elsewhere.

    Attributes:
        model: the model's shape, and a digest of its dimensions.
        device: kind of device; on CPU also the processor, the kernels and the number of threads.
        dtype: of weights and KV, and the formats of those that are codes, with the bits of a weight.
    """

    model: str
    device: str
    dtype: str

    @staticmethod
    def types(dtype: str, stored_in: str, weight_bits: float, kv_dtype: str = "") -> str:
        """``dtype`` of a key. Args: stored_in, weight_bits, kv_dtype: as ``ExecutorInfo`` has them."""
        weights = f"{stored_in} {weight_bits:.2f} bits" if stored_in else ""
        kv = f"kv {kv_dtype}" if kv_dtype else ""
        return "-".join(f"{dtype} {weights} {kv}".lower().split())


class MeasuredFile:
    """Base of a dataclass that is measured, and saved as a JSON file.

    Attributes:
        KIND: of file, in messages.
        FORMAT: number of its format; files of another one are refused.
        REMEDY: what the user can do about a file that cannot be used.
    """

    __slots__ = ()

    KIND: ClassVar[str]
    FORMAT: ClassVar[int]
    REMEDY: ClassVar[str]

    key: MeasuredOn

    def content(self) -> dict[str, Any]:
        """As ``parse`` takes it."""
        return {"format": self.FORMAT, **asdict(self)}  # type: ignore[call-overload]  # a dataclass

    def save(self, path: Path) -> None:
        """Replace the file as a whole; after an OSError it is unchanged, and no other file is left."""
        path.parent.mkdir(parents=True, exist_ok=True)
        # Two containers on one volume may have the same process id.
        partial = path.with_suffix(f".{uuid4().hex}.partial")
        text = json.dumps(self.content(), indent=1) + "\n"
        replace(path, text.encode(), mode=0o666, partial=partial)
        with suppress(OSError):  # not every file system syncs folders, and the file is there
            sync(path.parent)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises: ConfigError naming the file if it cannot be read, or as ``parse``."""
        try:
            content: object = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"The {cls.KIND} {path} cannot be read: {error.strerror or error}.") from error
        except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, or nested too deeply
            raise ConfigError(f"The {cls.KIND} {path} is not JSON: {cls.REMEDY}") from error
        return cls.parse(content, str(path))

    @classmethod
    def parse(cls, content: object, name: str) -> Self:
        """``content`` as JSON has it. Raises: ConfigError for another format, and where a value is wrong."""
        if not isinstance(content, dict) or content.get("format") != cls.FORMAT:
            raise ConfigError(f"The {cls.KIND} {name} is not of format {cls.FORMAT}: {cls.REMEDY}")
        try:
            return msgspec.convert(content, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"The {cls.KIND} {name} is damaged ({error}): {cls.REMEDY}") from error

    def check_key(self, key: MeasuredOn, name: str) -> None:
        """Raises: ConfigError, saying what differs, if the times were measured on something else."""
        for field in fields(MeasuredOn):
            measured, wanted = getattr(self.key, field.name), getattr(key, field.name)
            if measured != wanted:
                raise ConfigError(
                    f"The {self.KIND} {name} is of another {field.name}: measured on {measured!r}, here it "
                    f"is {wanted!r}; {self.REMEDY}"
                )


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises: ConfigError when the file cannot be written in the block."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error
