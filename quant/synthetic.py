"""`synth:SHAPE?seed=0&layers=4`: random weights of a real shape; a device for benchmarks.

Speed, memory and disk do not depend on what a model has learnt, so a shape stands in for a
checkpoint of many gigabytes: tensors are drawn one by one when they are read and forgotten
afterwards. Nothing here says anything about quality: such a model knows nothing.

    SHAPE       llama-3.1-8b | qwen3-14b | qwen3-32b | smollm2-135m, or a config.json to go by
    seed        another seed, other weights; default 0
    layers      only so many decoder layers; default all of the shape
    tokenizer   a directory with tokenizer files; default one made up of as many words as the
                shape's vocabulary has ids
    device      where tensors are drawn; default cpu. On cuda it is much faster, with other values
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor

from quant.checkpoint import Source
from quant.modelling import check_family, check_tensors, load_tokenizer
from quant.random_model import PREFIX, RandomModel


class SyntheticSource(Source):
    """A random model as a checkpoint to quantize.

    Raises SourceError for an unknown shape, key or value, UnsupportedModelError for a config.json
    of another family.
    """

    kind = "hf"  # names and files are those of a Hugging Face checkpoint
    dtype = RandomModel.dtype

    def __init__(self, model: str) -> None:
        self._random = RandomModel(model)
        self.path = Path(f"synth-{self._random.label}")
        self.config = self._random.config
        check_family(self.config, model)
        self.names = tuple(self._random.shapes)
        check_tensors(self.skeleton, self._random.shapes, model)

    @property
    def name(self) -> str:
        return self._random.name

    @property
    def num_bytes(self) -> int:
        return sum(math.prod(self.shape(name)) * self.dtype.itemsize for name in self.names)

    @property
    def digest(self) -> str:
        return self._random.digest

    def shape(self, name: str) -> tuple[int, ...]:
        return self._random.shapes[name]

    def raw_tensor(self, name: str) -> Tensor:
        return self._random.draw(name)  # it stays where it was asked to be drawn

    def files(self) -> dict[str, bytes]:
        return self._random.files

    def tokenizer(self) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            for name, data in self.files().items():
                (Path(folder) / name).write_bytes(data)
            return load_tokenizer(Path(folder))


def is_synthetic(model: str) -> bool:
    """Whether a model's name asks for a SyntheticSource."""
    return model.startswith(PREFIX)
