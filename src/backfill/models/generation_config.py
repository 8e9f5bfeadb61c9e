"""A model folder's ``generation_config.json``, and the tokens that end an output."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backfill.models.config import ModelConfig
from backfill.models.fields import Fields
from backfill.models.resolve import told_what_to_delete

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling parameters that the model's authors recommend; None where there is no recommendation."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_folder(cls, folder: str | Path) -> GenerationDefaults:
        """Parse ``folder/generation_config.json``; all None when there is none.

        Raises: CorruptModel if the file is not JSON or a value is out of range.
        """
        path = Path(folder) / "generation_config.json"
        if not path.is_file():
            return cls()
        with told_what_to_delete(folder):
            fields = Fields.from_file(path)
            return cls(
                temperature=fields.optional_number("temperature", minimum=0.0),
                top_p=fields.optional_number("top_p", minimum=0.0, maximum=1.0),
                top_k=fields.optional_integer("top_k"),
                min_p=fields.optional_number("min_p", minimum=0.0, maximum=1.0),
                repetition_penalty=fields.optional_number("repetition_penalty", minimum=0.0),
                eos_token_ids=fields.token_ids("eos_token_id"),
            )

    @property
    def recommended(self) -> dict[str, Any]:
        """What is recommended, as keywords of ``SamplingParams``."""
        fields = dataclasses.asdict(self)
        del fields["eos_token_ids"]
        return {name: value for name, value in fields.items() if value is not None}


def end_token_ids(config: ModelConfig, generation: GenerationDefaults) -> tuple[int, ...]:
    """Every id that ends a sequence, ascending: the union of two files' ids.

    The files disagree in practice: often only one has the token that ends a chat turn. An id outside
    the vocabulary cannot be sampled; it is left out with a warning.
    """
    ids = {*config.eos_token_ids, *generation.eos_token_ids}
    outside = sorted(token_id for token_id in ids if not 0 <= token_id < config.vocab_size)
    if outside:
        logger.warning(
            "the model's files name end tokens outside its vocabulary of %d: %s; they are ignored",
            config.vocab_size,
            ", ".join(map(str, outside)),
        )
    return tuple(sorted(ids.difference(outside)))
